#include "server/store.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <sqlite3.h>

#include "common/limits.h"

struct fixture {
    char directory[64];
    uv_loop_t loop;
    struct store *store;
};

static void remove_tree(const char *directory)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", directory);
    assert_int_equal(system(command), 0);
}

static int set_up(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    snprintf(f->directory, sizeof f->directory, "/tmp/tally-store-XXXXXX");
    assert_non_null(mkdtemp(f->directory));
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    remove_tree(f->directory);
    free(f);
    return 0;
}

static void open_store(struct fixture *f)
{
    struct tally_error err;
    assert_int_equal(uv_loop_init(&f->loop), 0);
    if (store_open(&f->loop, f->directory, &f->store, &err) != TALLY_OK)
        fail_msg("%s", err.message);
}

static void close_store(struct fixture *f)
{
    store_close(f->store, NULL, NULL);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
}

static void count_done(const struct tally_error *err, void *user)
{
    if (err->code != TALLY_OK)
        fail_msg("%s", err->message);
    ++*(unsigned *)user;
}

static struct event_batch *notice_batch(uint64_t first, unsigned count, const char *text)
{
    struct event_batch *batch = event_batch_new(first);
    for (unsigned i = 0; i < count; i++) {
        Tally__V1__Notice notice = TALLY__V1__NOTICE__INIT;
        notice.text = (char *)(uintptr_t)text;
        Tally__V1__Event event = TALLY__V1__EVENT__INIT;
        event.body_case = TALLY__V1__EVENT__BODY_NOTICE;
        event.notice = &notice;
        assert_int_equal(event_batch_add(batch, &event, NULL), TALLY_OK);
    }
    return batch;
}

static tally_status insert_job(struct store *store, uint64_t id, const char *name, struct event_batch *batch,
                               store_done done, void *user)
{
    char request_id[32];
    snprintf(request_id, sizeof request_id, "request-%llu", (unsigned long long)id);
    Tally__V1__Job job = TALLY__V1__JOB__INIT;
    job.id = id;
    job.name = (char *)(uintptr_t)name;
    job.state = TALLY__V1__JOB_STATE__QUEUED;
    job.reason = "waits";
    Tally__V1__JobSpec spec = TALLY__V1__JOB_SPEC__INIT;
    spec.name = (char *)(uintptr_t)name;
    spec.has_seed = true;
    spec.seed = 100 + id;
    Tally__V1__DataFacts facts = TALLY__V1__DATA_FACTS__INIT;
    facts.train_samples = 1000 * id;
    return store_insert(store, &job, request_id, &spec, &facts, batch, done, user, NULL);
}

struct loaded {
    unsigned count;
    uint64_t ids[16], last_seq[16];
    Tally__V1__JobState states[16];
    char names[16][32], requests[16][32];
};

static tally_status load_one(const struct store_job *job, void *user, struct tally_error *err)
{
    (void)err;
    struct loaded *l = user;
    if (l->count < 16) {
        l->ids[l->count] = job->id;
        l->last_seq[l->count] = job->last_seq;
        l->states[l->count] = job->job->state;
        snprintf(l->names[l->count], 32, "%s", job->job->name);
        snprintf(l->requests[l->count], 32, "%s", job->request_id);
        assert_null(job->job->spec);
    }
    l->count++;
    tally__v1__job__free_unpacked(job->job, NULL);
    return TALLY_OK;
}

static void what_is_written_is_there_again(void **state)
{
    struct fixture *f = *state;
    open_store(f);
    assert_int_equal(store_epoch(f->store), 1);
    assert_int_equal(store_next_job(f->store), 1);
    unsigned done = 0;
    struct event_batch *batch = notice_batch(1, 2, "hello");
    assert_int_equal(insert_job(f->store, 1, "one", batch, count_done, &done), TALLY_OK);
    event_batch_unref(batch);
    assert_int_equal(insert_job(f->store, 2, "two", NULL, count_done, &done), TALLY_OK);
    Tally__V1__Job job = TALLY__V1__JOB__INIT;
    Tally__V1__JobSpec no_spec = TALLY__V1__JOB_SPEC__INIT;
    job.id = 1;
    job.name = "one";
    job.state = TALLY__V1__JOB_STATE__RUNNING;
    job.spec = &no_spec; /* is not stored again */
    batch = notice_batch(3, 3, "again");
    assert_int_equal(store_update(f->store, 1, &job, batch, count_done, &done, NULL), TALLY_OK);
    event_batch_unref(batch);
    while (done < 3)
        uv_run(&f->loop, UV_RUN_ONCE);
    close_store(f);

    open_store(f);
    assert_int_equal(store_epoch(f->store), 2);
    assert_int_equal(store_next_job(f->store), 3);
    struct loaded l = {0};
    assert_int_equal(store_load(f->store, load_one, &l, NULL), TALLY_OK);
    assert_int_equal(l.count, 2);
    assert_int_equal(l.ids[0], 1);
    assert_string_equal(l.names[0], "one");
    assert_string_equal(l.requests[0], "request-1");
    assert_int_equal(l.states[0], TALLY__V1__JOB_STATE__RUNNING);
    assert_int_equal(l.last_seq[0], 5);
    assert_int_equal(l.states[1], TALLY__V1__JOB_STATE__QUEUED);
    assert_int_equal(l.last_seq[1], 0);
    Tally__V1__JobSpec *spec = NULL;
    Tally__V1__DataFacts *facts = NULL;
    assert_int_equal(store_read_spec(f->store, 1, &spec, &facts, NULL), TALLY_OK);
    assert_int_equal(spec->seed, 101);
    assert_int_equal(facts->train_samples, 1000);
    tally__v1__job_spec__free_unpacked(spec, NULL);
    tally__v1__data_facts__free_unpacked(facts, NULL);
    struct tally_error err;
    assert_int_equal(store_read_spec(f->store, 9, &spec, NULL, &err), TALLY_ENOTFOUND);
    assert_string_equal(err.message, "there is no job 9");
    close_store(f);
}

static void free_list(struct event_batch *first)
{
    while (first) {
        struct event_batch *next = first->next;
        event_batch_unref(first);
        first = next;
    }
}

static void events_are_read_in_pages(void **state)
{
    struct fixture *f = *state;
    open_store(f);
    unsigned done = 0;
    assert_int_equal(insert_job(f->store, 1, "one", NULL, count_done, &done), TALLY_OK);
    assert_int_equal(insert_job(f->store, 2, "two", NULL, count_done, &done), TALLY_OK);
    for (uint64_t i = 0; i < 100; i++) {
        for (uint64_t job = 1; job <= 2; job++) {
            struct event_batch *batch = notice_batch(1 + i * 7, 7, job == 1 ? "mine" : "another's");
            assert_int_equal(store_update(f->store, job, NULL, batch, count_done, &done, NULL), TALLY_OK);
            event_batch_unref(batch);
        }
    }
    while (done < 202)
        uv_run(&f->loop, UV_RUN_ONCE);
    for (uint64_t after = 0; after < 705; after += 1 + after / 50) {
        uint64_t next = after;
        unsigned pages = 0;
        for (;;) {
            struct event_batch *first = NULL;
            assert_int_equal(store_read_events(f->store, 1, next, 500, &first, NULL), TALLY_OK);
            if (!first)
                break;
            pages++;
            for (struct event_batch *b = first; b; b = b->next) {
                assert_true(b->first <= next + 1 && b->last > next);
                assert_int_equal(b->last - b->first, 6);
                Tally__V1__Events *events = tally__v1__events__unpack(NULL, b->bytes, b->data);
                assert_int_equal(events->n_events, 7);
                assert_string_equal(events->events[0]->notice->text, "mine");
                tally__v1__events__free_unpacked(events, NULL);
                next = b->last;
            }
            free_list(first);
        }
        assert_int_equal(next, after < 700 ? 700 : after);
        assert_true(after > 500 || pages > 3);
    }
    struct event_batch *none = NULL;
    assert_int_equal(store_read_events(f->store, 1, UINT64_MAX, 500, &none, NULL), TALLY_OK);
    assert_null(none);
    assert_int_equal(store_read_events(f->store, 7, 0, 500, &none, NULL), TALLY_OK);
    assert_null(none);
    close_store(f);
}

/* A process that is killed at any moment has lost nothing that it was told is durable, and what is there is a prefix.
 */
static void child_main(const char *directory, int pipe_fd)
{
    uv_loop_t loop;
    struct store *store = NULL;
    uv_loop_init(&loop);
    if (store_open(&loop, directory, &store, NULL) != TALLY_OK)
        _exit(9);
    uint64_t id = store_next_job(store);
    for (;; id += 3) {
        unsigned done = 0;
        for (unsigned i = 0; i < 3; i++) { /* a few at once, so that a kill falls between commits and inside them */
            struct event_batch *batch = notice_batch(1, 4, "x");
            insert_job(store, id + i, "job", batch, count_done, &done);
            event_batch_unref(batch);
        }
        while (done < 3)
            uv_run(&loop, UV_RUN_ONCE);
        uint64_t last = id + 2;
        if (write(pipe_fd, &last, sizeof last) != sizeof last)
            _exit(9);
    }
}

static tally_status check_prefix(const struct store_job *job, void *user, struct tally_error *err)
{
    (void)err;
    uint64_t *last = user;
    assert_true(job->id > *last);
    assert_int_equal(job->last_seq, 4);
    *last = job->id;
    tally__v1__job__free_unpacked(job->job, NULL);
    return TALLY_OK;
}

static void kill_9_loses_nothing_acknowledged(void **state)
{
    struct fixture *f = *state;
    for (unsigned round = 0; round < 12; round++) {
        int fds[2];
        assert_int_equal(pipe(fds), 0);
        pid_t child = fork();
        if (child == 0)
            child_main(f->directory, fds[1]);
        close(fds[1]);
        uint64_t acknowledged = 0, id;
        unsigned acknowledgements = 0;
        while (acknowledgements <= round && read(fds[0], &id, sizeof id) == sizeof id) {
            acknowledged = id;
            acknowledgements++;
        }
        assert_int_equal(acknowledgements, round + 1);
        usleep(round * 300);
        kill(child, SIGKILL);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status));
        while (read(fds[0], &id, sizeof id) == sizeof id)
            acknowledged = id;
        close(fds[0]);
        open_store(f);
        uint64_t last = 0;
        assert_int_equal(store_load(f->store, check_prefix, &last, NULL), TALLY_OK);
        assert_true(last >= acknowledged);
        assert_int_equal(store_epoch(f->store), 2 * (round + 1));
        close_store(f);
    }
}

static void a_second_coordinator_is_refused(void **state)
{
    struct fixture *f = *state;
    open_store(f);
    pid_t child = fork();
    if (child == 0) {
        uv_loop_t loop;
        struct store *store = NULL;
        struct tally_error err = {0};
        char expect[160];
        uv_loop_init(&loop);
        snprintf(expect, sizeof expect, "another coordinator (process %ld) has the state directory %s", (long)getppid(),
                 f->directory);
        tally_status code = store_open(&loop, f->directory, &store, &err);
        if (code != TALLY_EEXIST || strcmp(err.message, expect) != 0) {
            fprintf(stderr, "%s\n", err.message);
            _exit(1);
        }
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    close_store(f);
    open_store(f); /* and let in once the first has gone */
    close_store(f);
}

static void expect_open_error(struct fixture *f, const char *directory, tally_status code, const char *text)
{
    struct tally_error err;
    assert_int_equal(uv_loop_init(&f->loop), 0);
    tally_status got = store_open(&f->loop, directory, &f->store, &err);
    if (got != code || !strstr(err.message, text))
        fail_msg("%s: %s", tally_status_text(got), err.message);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
}

static void bad_directories_are_told(void **state)
{
    struct fixture *f = *state;
    expect_open_error(f, "/proc/tally", TALLY_ENOTFOUND, "/proc/tally");
    char path[128];
    snprintf(path, sizeof path, "%s/jobs.sqlite", f->directory);
    FILE *file = fopen(path, "w");
    for (int i = 0; i < 1000; i++)
        fputs("this is no database ", file);
    fclose(file);
    expect_open_error(f, f->directory, TALLY_EIO, "file is not a database");
    unlink(path);
    sqlite3 *db = NULL;
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, "PRAGMA user_version = 77", NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
    expect_open_error(f, f->directory, TALLY_EUNSUPPORTED, "was written by a newer Tally (schema 77");
}

struct outcome {
    unsigned count, failed;
    struct tally_error first;
};

static void note_outcome(const struct tally_error *err, void *user)
{
    struct outcome *o = user;
    o->count++;
    if (err->code != TALLY_OK && o->failed++ == 0)
        o->first = *err;
}

/* A file that may not grow stands for a full disk: the error says so, later writes fail too, and what is on disk is a
 * prefix. */
static void a_full_disk_is_told_and_nothing_is_skipped(void **state)
{
    struct fixture *f = *state;
    signal(SIGXFSZ, SIG_IGN);
    open_store(f);
    struct outcome o = {0};
    char *text = malloc(50001);
    memset(text, 'x', 50000);
    text[50000] = '\0';
    assert_int_equal(insert_job(f->store, 1, "one", NULL, note_outcome, &o), TALLY_OK);
    while (o.count < 1)
        uv_run(&f->loop, UV_RUN_ONCE);
    struct rlimit old, low;
    getrlimit(RLIMIT_FSIZE, &old);
    low = old;
    low.rlim_cur = 1 << 20;
    setrlimit(RLIMIT_FSIZE, &low);
    for (uint64_t i = 0; i < 60; i++) {
        struct event_batch *batch = notice_batch(1 + i, 1, text);
        assert_int_equal(store_update(f->store, 1, NULL, batch, note_outcome, &o, NULL), TALLY_OK);
        event_batch_unref(batch);
        while (o.count < i + 2)
            uv_run(&f->loop, UV_RUN_ONCE);
        if (i == 50)
            setrlimit(RLIMIT_FSIZE, &old); /* room again: but nothing may be skipped */
    }
    assert_true(o.failed > 9 && o.failed < 60);
    if (!strstr(o.first.message, f->directory))
        fail_msg("%s", o.first.message);
    close_store(f);
    open_store(f);
    struct loaded l = {0};
    assert_int_equal(store_load(f->store, load_one, &l, NULL), TALLY_OK);
    assert_int_equal(l.count, 1);
    assert_int_equal(l.last_seq[0], 60 - o.failed);
    close_store(f);
    free(text);
}

/* The queue to a disk that does not keep up has a bound. */
static void the_queue_is_bounded(void **state)
{
    struct fixture *f = *state;
    open_store(f);
    struct outcome o = {0};
    unsigned taken = 0;
    struct event_batch *batch = event_batch_new(1);
    Tally__V1__Notice notice = TALLY__V1__NOTICE__INIT;
    char *text = malloc(200001);
    memset(text, 'x', 200000);
    text[200000] = '\0';
    notice.text = text;
    Tally__V1__Event event = TALLY__V1__EVENT__INIT;
    event.body_case = TALLY__V1__EVENT__BODY_NOTICE;
    event.notice = &notice;
    assert_int_equal(event_batch_add(batch, &event, NULL), TALLY_OK);
    struct tally_error err;
    tally_status status;
    /* `done` runs on the loop alone, so without it nothing leaves the queue's count. */
    while ((status = store_update(f->store, taken + 1, NULL, batch, note_outcome, &o, &err)) == TALLY_OK)
        taken++;
    assert_int_equal(status, TALLY_ENOMEM);
    assert_non_null(strstr(err.message, "does not keep up"));
    assert_in_range(taken, TALLY_STORE_QUEUE_BYTES / 210000, TALLY_STORE_QUEUE_BYTES / 200000 + 2);
    while (o.count < taken)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(o.failed, 0);
    assert_int_equal(store_update(f->store, taken + 1, NULL, batch, note_outcome, &o, &err), TALLY_OK);
    event_batch_unref(batch);
    free(text);
    close_store(f);
    assert_int_equal(o.count, taken + 1); /* closing waits for what was taken */
}

/* A disk that hangs holds up nobody who closes the store. */
static void closing_does_not_wait_for_the_disk(void **state)
{
    struct fixture *f = *state;
    open_store(f);
    char path[128];
    sqlite3 *db = NULL;
    snprintf(path, sizeof path, "%s/jobs.sqlite", f->directory);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, "BEGIN IMMEDIATE", NULL, NULL, NULL), SQLITE_OK);
    struct outcome o = {0};
    assert_int_equal(insert_job(f->store, 1, "one", NULL, note_outcome, &o), TALLY_OK);
    uint64_t before = uv_hrtime();
    store_close(f->store, NULL, NULL);
    uv_run(&f->loop, UV_RUN_NOWAIT);
    assert_true(uv_hrtime() - before < 1000000000);
    assert_int_equal(o.count, 0);
    assert_int_equal(sqlite3_exec(db, "COMMIT", NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    assert_int_equal(o.count, 1);
    assert_int_equal(o.failed, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_is_written_is_there_again, set_up, tear_down),
        cmocka_unit_test_setup_teardown(events_are_read_in_pages, set_up, tear_down),
        cmocka_unit_test_setup_teardown(kill_9_loses_nothing_acknowledged, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_second_coordinator_is_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(bad_directories_are_told, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_full_disk_is_told_and_nothing_is_skipped, set_up, tear_down),
        cmocka_unit_test_setup_teardown(the_queue_is_bounded, set_up, tear_down),
        cmocka_unit_test_setup_teardown(closing_does_not_wait_for_the_disk, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
