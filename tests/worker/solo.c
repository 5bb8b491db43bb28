#include "tests/worker/solo.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

void solo_open_job(const struct test_job *job, const struct memory_hub_options *options, struct solo *ret_solo)
{
    struct solo s = {0};
    struct tally_error err;
    test_rank_open(job, 0, 1, NULL, &s.rank);
    struct memory_hub_options hub = options ? *options : (struct memory_hub_options){0};
    hub.clients = 1;
    if (memory_hub_open(s.rank.plan, &hub, &s.hub, &err))
        fail_msg("%s", err.message);
    s.transport = memory_hub_join(s.hub, 0, executor_weights(s.rank.executor));
    *ret_solo = s;
}

void solo_open(Tally__V1__JobSpec *spec, const struct memory_hub_options *options, struct solo *ret_solo)
{
    struct test_job *job = test_job_open(spec);
    solo_open_job(job, options, ret_solo);
    ret_solo->job = job;
}

void solo_close(struct solo *solo)
{
    memory_hub_close(solo->hub);
    test_rank_close(&solo->rank);
    test_job_close(solo->job);
}

void solo_step(struct solo *solo, uint64_t step)
{
    struct tally_error err;
    if (executor_step(solo->rank.executor, solo->transport, step, &err))
        fail_msg("step %llu: %s", (unsigned long long)step, err.message);
}
