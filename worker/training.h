#ifndef WORKER_TRAINING_H
#define WORKER_TRAINING_H
/*
 * The training loop of one rank: its replica's leaves of every step, and share of every evaluation, in between, as far
 * as its stage goes.
 *
 * An evaluation at version t (after an epoch's last step, and after the job's last) is shared among the replicas that
 * have leaves in step t + 1 (the job's last evaluation: in step t): none of the weights can be replaced before all of
 * these have pushed step t + 1, and a rank does its share before that.
 */
#include "worker/executor.h"

struct training_events {
    /* Step `step` is about to begin; or, evaluating, an evaluation at that version. May be NULL. */
    void (*on_progress)(uint64_t step, bool evaluating, void *user);
    /* One evaluation micro-batch was run, told by the stage that has the loss. May be NULL. */
    void (*on_evaluated)(uint64_t version, uint32_t micro_batch, const struct kernel_loss *loss, uint32_t samples,
                         void *user);
    /* This rank's share of the evaluation at that version is done. May be NULL. */
    void (*on_evaluation_end)(uint64_t version, void *user);
};

struct training {
    const struct plan *plan;
    struct executor *executor;
    struct transport *transport;
    struct peers *peers; /* the executor's; may be NULL */
    struct training_events events;
    void *user;
};

/*
 * Runs steps start_step + 1 to the job's last, and returns when everything that it pushed has left. An evaluation that
 * is due at start_step is run too: the gang before may not have finished it. A rank that has no leaf in any step
 * returns at once. TALLY_EINVAL: the job has fewer steps than start_step.
 */
tally_status training_run(const struct training *training, uint64_t start_step, struct tally_error *err);

/* Has this plan's rank anything to do in that step, from 1? false for a step that the job does not have. */
bool training_has_leaves(const struct plan *plan, uint64_t step);
/* Is the model evaluated with the weights after so many steps? */
bool training_evaluates(const struct plan *plan, uint64_t version);
/* The evaluation micro-batches of this plan's rank at a version; may be empty. */
struct tree_node training_evaluation_share(const struct plan *plan, uint64_t version);
#endif
