/* Clients that do not read what a job has to tell. */
#include "tests/server/fake_cluster.h"

#include "common/clock.h"
#include "common/limits.h"

#define LONG_STEPS 120000

/* Of so many steps that their events are far more than what is kept in memory. */
static uint64_t submit_long(struct fake_cluster *f)
{
    Tally__V1__Version version = TALLY__V1__VERSION__INIT;
    Tally__V1__SubmitRequest request = TALLY__V1__SUBMIT_REQUEST__INIT;
    version.major = TALLY_PROTOCOL_MAJOR;
    request.version = &version;
    request.request_id = "long";
    request.spec = fake_spec("1", 1);
    request.spec->train->epochs = LONG_STEPS / 10;
    request.spec->data->test->synthetic->samples = 20;
    request.facts = fake_facts();
    Tally__V1__Job *job = (Tally__V1__Job *)fake_call(f, "Submit", &request.base, NULL);
    uint64_t id = job->id;
    assert_int_equal(job->steps, LONG_STEPS);
    tally__v1__job__free_unpacked(job, NULL);
    tally__v1__job_spec__free_unpacked(request.spec, NULL);
    tally__v1__data_facts__free_unpacked(request.facts, NULL);
    return id;
}

static void train_long(struct fake_cluster *f, const struct model *model)
{
    struct fake_node *s0 = fake_join(f, "s0"), *w0 = fake_join(f, "w0");
    s0->model = model;
    fake_until(f, s0->open_job);
    fake_opened(s0);
    fake_until(f, w0->assign);
    fake_started(w0);
    for (uint64_t step = 0; step < LONG_STEPS; step += 1500) {
        fake_steps(s0, step + 1, step + 1500);
        fake_until(f, rpc_stream_queued_messages(s0->stream) < 16);
    }
    s0->version = LONG_STEPS - 1;
    s0->oldest = LONG_STEPS - 2;
}

/* A reader that does not read costs a page, not the job's events; it gets all of them later, from the store. */
static void a_slow_watcher_misses_nothing(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    struct model *model = fake_model();
    uint64_t id = submit_long(f);
    struct fake_watch *slow = fake_watch_open(f, id, 0, true), *quick = fake_watch_open(f, id, 0, false);
    train_long(f, model);
    fake_until(f, quick->steps == LONG_STEPS);
    assert_true(slow->messages <= 4 && slow->steps < LONG_STEPS);
    fake_stop_job(f, id, "");
    fake_until(f, !quick->stream);
    fake_watch_ended(quick, TALLY__V1__JOB_STATE__STOPPED, "");
    assert_true(slow->messages <= 4);
    slow->holds = false;
    rpc_stream_grant(slow->stream, 4);
    fake_until(f, !slow->stream);
    fake_watch_ended(slow, TALLY__V1__JOB_STATE__STOPPED, "");
    assert_int_equal(slow->steps, LONG_STEPS);
    assert_true(slow->loss_sum == quick->loss_sum);
    fake_watch_free(slow);
    fake_watch_free(quick);
    fake_close(f);
    model_free(model);
}

/* On a connection whose buffers have not grown with what others read. */
static struct fake_watch *open_stuck(struct fake_cluster *f, uint64_t id, struct rpc_channel **ret_channel)
{
    const struct rpc_channel_options own = {.own_connection = true};
    struct rpc_channel *shared = f->channel;
    assert_int_equal(rpc_channel_new(f->listen, &own, &f->channel, NULL), TALLY_OK);
    struct fake_watch *stuck = fake_watch_open(f, id, 0, true);
    *ret_channel = f->channel;
    f->channel = shared;
    return stuck;
}

/* Places of watchers are few: who reads nothing for long gives his up, and goes on later where he was. Who has nothing
 * to read keeps it. */
static void who_reads_nothing_gives_way(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    f->reader_timeout_ms = 300;
    fake_restart(f);
    struct model *model = fake_model();
    uint64_t id = submit_long(f), waits = fake_submit(f, "waits", "1", 1);
    struct fake_watch *quick = fake_watch_open(f, id, 0, false), *idle = fake_watch_open(f, waits, 0, false);
    train_long(f, model);
    fake_until(f, quick->steps == LONG_STEPS);
    struct rpc_channel *channel = NULL;
    struct fake_watch *stuck = open_stuck(f, id, &channel);
    fake_poll_for(f, 1500);
    stuck->holds = false;
    rpc_stream_grant(stuck->stream, 100);
    fake_until(f, !stuck->stream);
    assert_int_equal(stuck->end.code, TALLY_ECANCELLED);
    assert_true(stuck->steps < LONG_STEPS && !stuck->gap);
    struct fake_watch *again = fake_watch_open(f, id, stuck->last_seq, false);
    fake_until(f, stuck->steps + again->steps == LONG_STEPS);
    assert_false(again->gap);
    assert_non_null(idle->stream);
    fake_stop_job(f, waits, "");
    fake_until(f, !idle->stream);
    fake_stop_job(f, id, "");
    fake_until(f, !again->stream && !quick->stream);
    struct fake_watch *all[] = {quick, idle, stuck, again};
    for (size_t i = 0; i < 4; i++)
        fake_watch_free(all[i]);
    rpc_channel_free(channel);
    fake_close(f);
    model_free(model);
}

int main(void)
{
    rpc_global_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_slow_watcher_misses_nothing),
        cmocka_unit_test(who_reads_nothing_gives_way),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    rpc_global_shutdown();
    return failed;
}
