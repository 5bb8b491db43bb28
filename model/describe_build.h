#ifndef MODEL_DESCRIBE_BUILD_H
#define MODEL_DESCRIBE_BUILD_H
/* The pieces of describe.h, inside model/ alone. */
#include "model/describe.h"
#include "model/schedule.h"

/* A step of the first replica, simulated with computed costs (floating-point operations). */
struct described_schedule {
    struct schedule *schedule;
    struct schedule_report *report;
    uint64_t *forward, *backward; /* by segment */
};
tally_status described_schedule_open(const struct plan *plan, struct described_schedule *ret, struct tally_error *err);
void described_schedule_free(struct described_schedule *d);
/* A stage's share of the cost; the share of the step in which it does nothing. */
double described_share(const struct plan *plan, const struct described_schedule *d, uint32_t stage);
double described_idle(const struct described_schedule *d, uint32_t stage);

/* The stages as a table. */
tally_status describe_stages(FILE *out, const struct plan *plan, struct tally_error *err);

/* The plan of another rank that has the same stage and as many micro-batches: what plan_levels and plan_memory read. */
struct plan describe_rank(const struct plan *plan, uint32_t rank);
#endif
