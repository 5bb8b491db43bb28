/*
 * What the coordinator costs while a fast job reports its steps: the CPU time of the coordinator's threads (loop,
 * network, store) over ten seconds at 15,000 steps a second, a message every 100 ms, with one client that watches.
 */
#include "tests/server/fake_cluster.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/clock.h"
#include "common/limits.h"
#include "common/log.h"

#define STEPS_EACH 1500
#define INTERVAL_NS 100000000
#define ROUNDS 100

static double cpu_seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Everything but this thread, which plays the nodes and the client. */
static double coordinator_seconds(void)
{
    return cpu_seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
}

static uint64_t submit_long(struct fake_cluster *f)
{
    Tally__V1__Version version = TALLY__V1__VERSION__INIT;
    Tally__V1__SubmitRequest request = TALLY__V1__SUBMIT_REQUEST__INIT;
    version.major = TALLY_PROTOCOL_MAJOR;
    request.version = &version;
    request.request_id = "bench";
    request.spec = fake_spec("1", 1);
    request.spec->train->epochs = 1000000;
    request.facts = fake_facts();
    Tally__V1__Job *job = (Tally__V1__Job *)fake_call(f, "Submit", &request.base, NULL);
    uint64_t id = job->id;
    tally__v1__job__free_unpacked(job, NULL);
    tally__v1__job_spec__free_unpacked(request.spec, NULL);
    tally__v1__data_facts__free_unpacked(request.facts, NULL);
    return id;
}

static void measure(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    struct fake_node *s0 = fake_join(f, "s0"), *w0 = fake_join(f, "w0");
    struct fake_watch *w = fake_watch_open(f, submit_long(f), 0, false);
    fake_until(f, s0->open_job);
    fake_opened(s0);
    fake_until(f, w0->assign);
    fake_started(w0);
    fake_until(f, w->state == TALLY__V1__JOB_STATE__RUNNING);

    double idle = coordinator_seconds();
    fake_poll_for(f, 2000);
    idle = (coordinator_seconds() - idle) / 2;
    double busy = coordinator_seconds();
    int64_t begin = tally_now_ns();
    for (uint64_t round = 0; round < ROUNDS; round++) {
        fake_steps(s0, round * STEPS_EACH + 1, (round + 1) * STEPS_EACH);
        while (tally_now_ns() < begin + (int64_t)(round + 1) * INTERVAL_NS)
            fake_poll(f);
    }
    fake_until(f, w->steps == ROUNDS * STEPS_EACH);
    double seconds = (double)(tally_now_ns() - begin) / 1e9;
    busy = (coordinator_seconds() - busy) / seconds;
    assert_false(w->gap);
    printf("idle, 2 nodes beating 50 times a second: %.2f %% of a core\n", 100 * idle);
    printf("%.0f steps/s: %.2f %% of a core, %.2f us a step\n", ROUNDS * STEPS_EACH / seconds, 100 * busy,
           1e6 * busy * seconds / (ROUNDS * STEPS_EACH));
    rpc_stream_cancel(w->stream);
    fake_until(f, !w->stream);
    fake_watch_free(w);
    fake_close(f);
}

int main(void)
{
    tally_log_init("bench", "", TALLY_LOG_WARN);
    rpc_global_init();
    const struct CMUnitTest tests[] = {cmocka_unit_test(measure)};
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    rpc_global_shutdown();
    return failed;
}
