#include "server/store.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "common/file.h"
#include "common/limits.h"

/*
 * DESIGN
 * The loop appends writes to `waiting` under the mutex. The writer takes the whole list, makes one transaction of it,
 * and appends it to `finished`; the async handle wakes the loop, which calls each `done`. `write_db` and its statements
 * belong to the writer once it runs; `read_db` is shared by readers (SQLite serialises them).
 */

struct write {
    struct write *next;
    uint64_t job;
    char *request_id; /* set: insert */
    int state;
    uint8_t *record, *spec, *facts; /* packed; record NULL: unchanged */
    size_t record_bytes, spec_bytes, facts_bytes;
    struct event_batch *batch;
    size_t bytes; /* what it holds, for the bound */
    struct tally_error result;
    store_done done;
    void *user;
};

struct write_list {
    struct write *first, **end;
};

struct store {
    char *directory;
    int lock_fd;
    sqlite3 *write_db, *read_db;
    sqlite3_stmt *insert, *update, *append;
    uint64_t epoch, next_job;
    uv_async_t wake;
    pthread_t writer;
    pthread_mutex_t mutex; /* of what follows */
    pthread_cond_t work;
    struct write_list waiting, finished;
    size_t waiting_bytes;       /* of writes whose done has not run */
    bool closing, ended;        /* the writer is to end; nothing is left of it but to be joined */
    struct tally_error failure; /* code TALLY_OK: none */
    void (*on_closed)(void *user);
    void *closed_user;
};

static void list_init(struct write_list *list)
{
    list->first = NULL;
    list->end = &list->first;
}

static void list_append(struct write_list *list, struct write_list *tail)
{
    if (!tail->first)
        return;
    *list->end = tail->first;
    list->end = tail->end;
    list_init(tail);
}

/* The loop's thread takes the list over; `end` is set right for an empty one, too. */
static struct write *list_take(struct write_list *list)
{
    struct write *first = list->first;
    list_init(list);
    return first;
}

static void write_free(struct write *w)
{
    free(w->request_id);
    free(w->record);
    free(w->spec);
    free(w->facts);
    event_batch_unref(w->batch);
    free(w);
}

/* ---- SQLite's errors ---- */

static tally_status fail_sqlite(const struct store *store, sqlite3 *db, int code, const char *what,
                                struct tally_error *err)
{
    int system = db ? sqlite3_system_errno(db) : 0;
    const char *text = db ? sqlite3_errmsg(db) : sqlite3_errstr(code);
    switch (code & 0xff) {
    case SQLITE_NOMEM:
        return tally_fail(err, TALLY_ENOMEM, "%s: no memory", what);
    case SQLITE_FULL:
        return tally_fail(err, TALLY_EIO, "%s: no space left in the state directory %s", what, store->directory);
    default:
        if (system != 0) {
            char reason[128];
            return tally_fail(err, TALLY_EIO, "%s in the state directory %s: %s (%s)", what, store->directory, text,
                              strerror_r(system, reason, sizeof reason));
        }
        return tally_fail(err, TALLY_EIO, "%s in the state directory %s: %s", what, store->directory, text);
    }
}

static tally_status execute(const struct store *store, sqlite3 *db, const char *sql, const char *what,
                            struct tally_error *err)
{
    int code = sqlite3_exec(db, sql, NULL, NULL, NULL);
    return code == SQLITE_OK ? TALLY_OK : fail_sqlite(store, db, code, what, err);
}

/* One row of one integer; *ret_value is `none` where there is no row or it is NULL. */
static tally_status query_integer(const struct store *store, sqlite3 *db, const char *sql, int64_t none,
                                  int64_t *ret_value, struct tally_error *err)
{
    sqlite3_stmt *statement = NULL;
    int code = sqlite3_prepare_v2(db, sql, -1, &statement, NULL);
    if (code == SQLITE_OK)
        code = sqlite3_step(statement);
    tally_status status = TALLY_OK;
    if (code == SQLITE_ROW)
        *ret_value = sqlite3_column_type(statement, 0) == SQLITE_NULL ? none : sqlite3_column_int64(statement, 0);
    else if (code == SQLITE_DONE)
        *ret_value = none;
    else
        status = fail_sqlite(store, db, code, "cannot read the store", err);
    sqlite3_finalize(statement);
    return status;
}

/* ---- schema ---- */

/* Version n is reached by running migrations[n - 1] on version n - 1. Never change one that was released: add another.
 */
static const char *const migrations[] = {
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL);"
    "INSERT INTO meta VALUES ('epoch', 0);"
    /* AUTOINCREMENT: an id is never used again. record, spec and facts are packed messages: a Job without spec,
       JobSpec, DataFacts. */
    "CREATE TABLE jobs (id INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL UNIQUE, state INTEGER NOT NULL,"
    "                   record BLOB NOT NULL, spec BLOB NOT NULL, facts BLOB NOT NULL);"
    /* body: a packed Events message of events first..last. */
    "CREATE TABLE events (id INTEGER PRIMARY KEY, job INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, "
    "body BLOB NOT NULL);"
    "CREATE UNIQUE INDEX events_by_job ON events (job, last);",
};

#define SCHEMA_VERSION ((int64_t)(sizeof migrations / sizeof migrations[0]))

static tally_status migrate(struct store *store, struct tally_error *err)
{
    int64_t version = 0;
    tally_status status = query_integer(store, store->write_db, "PRAGMA user_version", 0, &version, err);
    if (status != TALLY_OK)
        return status;
    if (version > SCHEMA_VERSION)
        return tally_fail(err, TALLY_EUNSUPPORTED,
                          "the state directory %s was written by a newer Tally (schema %" PRId64
                          ", this one knows %" PRId64 ")",
                          store->directory, version, SCHEMA_VERSION);
    for (; version < SCHEMA_VERSION; version++) {
        char number[64];
        snprintf(number, sizeof number, "PRAGMA user_version = %" PRId64 "; COMMIT;", version + 1);
        status = execute(store, store->write_db, "BEGIN IMMEDIATE", "cannot write", err);
        if (status == TALLY_OK)
            status = execute(store, store->write_db, migrations[version], "cannot bring the schema up to date", err);
        if (status == TALLY_OK)
            status = execute(store, store->write_db, number, "cannot write", err);
        if (status != TALLY_OK)
            return status; /* the transaction ends with the connection */
    }
    return TALLY_OK;
}

/* ---- opening ---- */

static tally_status take_lock(struct store *store, struct tally_error *err)
{
    char *path = path_join(store->directory, "lock");
    if (!path)
        return tally_fail(err, TALLY_ENOMEM, "no memory to open the store");
    tally_status status = TALLY_OK;
    store->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (store->lock_fd < 0) {
        status = tally_fail_errno(err, "cannot write in the state directory %s", store->directory);
    } else if (flock(store->lock_fd, LOCK_EX | LOCK_NB) != 0) {
        char owner[32] = "";
        ssize_t got = errno == EWOULDBLOCK ? pread(store->lock_fd, owner, sizeof owner - 1, 0) : -1;
        if (got < 0)
            status = tally_fail_errno(err, "cannot lock %s", path);
        else
            status = tally_fail(err, TALLY_EEXIST, "another coordinator (process %.*s) has the state directory %s",
                                (int)strspn(owner, "0123456789"), owner, store->directory);
    } else {
        /* For whoever is refused; the lock itself is what counts. */
        char owner[32];
        int length = snprintf(owner, sizeof owner, "%ld\n", (long)getpid());
        if (ftruncate(store->lock_fd, 0) != 0 || pwrite(store->lock_fd, owner, (size_t)length, 0) != length)
            status = tally_fail_errno(err, "cannot write in the state directory %s", store->directory);
    }
    free(path);
    return status;
}

static tally_status open_database(struct store *store, const char *path, int flags, sqlite3 **ret_db,
                                  struct tally_error *err)
{
    int code = sqlite3_open_v2(path, ret_db, flags | SQLITE_OPEN_FULLMUTEX, NULL);
    if (code != SQLITE_OK)
        return fail_sqlite(store, *ret_db, code, "cannot open the store", err);
    sqlite3_extended_result_codes(*ret_db, 1);
    sqlite3_busy_timeout(*ret_db, 5000);
    return TALLY_OK;
}

static tally_status prepare(struct store *store, const char *sql, sqlite3_stmt **ret_statement, struct tally_error *err)
{
    int code = sqlite3_prepare_v3(store->write_db, sql, -1, SQLITE_PREPARE_PERSISTENT, ret_statement, NULL);
    return code == SQLITE_OK ? TALLY_OK : fail_sqlite(store, store->write_db, code, "cannot prepare a statement", err);
}

static tally_status open_databases(struct store *store, struct tally_error *err)
{
    char *path = path_join(store->directory, "jobs.sqlite");
    if (!path)
        return tally_fail(err, TALLY_ENOMEM, "no memory to open the store");
    int64_t epoch = 0, last = 0;
    tally_status status = open_database(store, path, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, &store->write_db, err);
    if (status == TALLY_OK)
        status = execute(store, store->write_db,
                         "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA trusted_schema = OFF",
                         "cannot set up the store", err);
    if (status == TALLY_OK)
        status = migrate(store, err);
    if (status == TALLY_OK)
        status = execute(store, store->write_db, "UPDATE meta SET value = value + 1 WHERE key = 'epoch'",
                         "cannot write", err);
    if (status == TALLY_OK)
        status = query_integer(store, store->write_db, "SELECT value FROM meta WHERE key = 'epoch'", 0, &epoch, err);
    if (status == TALLY_OK)
        status =
            query_integer(store, store->write_db, "SELECT seq FROM sqlite_sequence WHERE name = 'jobs'", 0, &last, err);
    if (status == TALLY_OK)
        status = prepare(
            store, "INSERT INTO jobs (id, request_id, state, record, spec, facts) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            &store->insert, err);
    if (status == TALLY_OK)
        status = prepare(store, "UPDATE jobs SET state = ?2, record = ?3 WHERE id = ?1", &store->update, err);
    if (status == TALLY_OK)
        status =
            prepare(store, "INSERT INTO events (job, first, last, body) VALUES (?1, ?2, ?3, ?4)", &store->append, err);
    if (status == TALLY_OK)
        status = open_database(store, path, SQLITE_OPEN_READWRITE, &store->read_db, err);
    store->epoch = (uint64_t)epoch;
    store->next_job = (uint64_t)last + 1;
    free(path);
    return status;
}

static void store_free(struct store *store)
{
    sqlite3_finalize(store->insert);
    sqlite3_finalize(store->update);
    sqlite3_finalize(store->append);
    sqlite3_close(store->read_db);
    sqlite3_close(store->write_db);
    if (store->lock_fd >= 0)
        close(store->lock_fd);
    pthread_cond_destroy(&store->work);
    pthread_mutex_destroy(&store->mutex);
    free(store->directory);
    free(store);
}

static void *writer_main(void *user);
static void on_wake(uv_async_t *handle);

static void on_free(uv_handle_t *handle)
{
    struct store *store = handle->data;
    void (*on_closed)(void *user) = store->on_closed;
    void *user = store->closed_user;
    store_free(store);
    if (on_closed)
        on_closed(user);
}

tally_status store_open(uv_loop_t *loop, const char *directory, struct store **ret_store, struct tally_error *err)
{
    tally_status status = file_make_dirs(directory, 0700, err);
    if (status != TALLY_OK)
        return status;
    struct store *store = calloc(1, sizeof *store);
    if (!store)
        return tally_fail(err, TALLY_ENOMEM, "no memory to open the store");
    store->lock_fd = -1;
    pthread_mutex_init(&store->mutex, NULL);
    pthread_cond_init(&store->work, NULL);
    list_init(&store->waiting);
    list_init(&store->finished);
    store->directory = strdup(directory);
    status = store->directory ? take_lock(store, err) : tally_fail(err, TALLY_ENOMEM, "no memory to open the store");
    if (status == TALLY_OK)
        status = open_databases(store, err);
    if (status == TALLY_OK && uv_async_init(loop, &store->wake, on_wake) != 0)
        status = tally_fail(err, TALLY_EIO, "cannot open the store: no file descriptor is left");
    if (status != TALLY_OK) {
        store_free(store);
        return status;
    }
    store->wake.data = store;
    if (pthread_create(&store->writer, NULL, writer_main, store) != 0) {
        uv_close((uv_handle_t *)&store->wake, on_free);
        return tally_fail(err, TALLY_EIO, "cannot start the store's thread");
    }
    *ret_store = store;
    return TALLY_OK;
}

uint64_t store_epoch(const struct store *store)
{
    return store->epoch;
}

uint64_t store_next_job(const struct store *store)
{
    return store->next_job;
}

/* ---- the writer's thread ---- */

static int step_and_reset(sqlite3_stmt *statement)
{
    int code = sqlite3_step(statement);
    sqlite3_reset(statement);
    sqlite3_clear_bindings(statement);
    return code == SQLITE_DONE ? SQLITE_OK : code;
}

static int apply_insert(struct store *store, const struct write *w)
{
    sqlite3_stmt *s = store->insert;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)w->job);
    sqlite3_bind_text(s, 2, w->request_id, -1, SQLITE_STATIC);
    sqlite3_bind_int(s, 3, w->state);
    sqlite3_bind_blob64(s, 4, w->record, w->record_bytes, SQLITE_STATIC);
    sqlite3_bind_blob64(s, 5, w->spec, w->spec_bytes, SQLITE_STATIC);
    sqlite3_bind_blob64(s, 6, w->facts, w->facts_bytes, SQLITE_STATIC);
    return step_and_reset(s);
}

static int apply_update(struct store *store, const struct write *w)
{
    sqlite3_stmt *s = store->update;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)w->job);
    sqlite3_bind_int(s, 2, w->state);
    sqlite3_bind_blob64(s, 3, w->record, w->record_bytes, SQLITE_STATIC);
    return step_and_reset(s);
}

static int apply_events(struct store *store, const struct write *w)
{
    sqlite3_stmt *s = store->append;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)w->job);
    sqlite3_bind_int64(s, 2, (sqlite3_int64)w->batch->first);
    sqlite3_bind_int64(s, 3, (sqlite3_int64)w->batch->last);
    sqlite3_bind_blob64(s, 4, w->batch->data, w->batch->bytes, SQLITE_STATIC);
    return step_and_reset(s);
}

static int apply(struct store *store, const struct write *w)
{
    int code = SQLITE_OK;
    if (w->request_id)
        code = apply_insert(store, w);
    else if (w->record)
        code = apply_update(store, w);
    if (code == SQLITE_OK && w->batch)
        code = apply_events(store, w);
    return code;
}

/* One transaction of the whole list. */
static tally_status commit_all(struct store *store, const struct write *first, struct tally_error *err)
{
    int code = sqlite3_exec(store->write_db, "BEGIN IMMEDIATE", NULL, NULL, NULL);
    for (const struct write *w = first; w && code == SQLITE_OK; w = w->next)
        code = apply(store, w);
    if (code == SQLITE_OK)
        code = sqlite3_exec(store->write_db, "COMMIT", NULL, NULL, NULL);
    if (code == SQLITE_OK)
        return TALLY_OK;
    fail_sqlite(store, store->write_db, code, "cannot write", err);
    if (!sqlite3_get_autocommit(store->write_db))
        sqlite3_exec(store->write_db, "ROLLBACK", NULL, NULL, NULL);
    return err->code;
}

static void *writer_main(void *user)
{
    struct store *store = user;
    pthread_mutex_lock(&store->mutex);
    for (;;) {
        while (!store->waiting.first && !store->closing)
            pthread_cond_wait(&store->work, &store->mutex);
        if (!store->waiting.first)
            break;
        struct write_list list;
        list_init(&list);
        list_append(&list, &store->waiting);
        struct tally_error result = store->failure;
        pthread_mutex_unlock(&store->mutex);
        if (result.code == TALLY_OK)
            commit_all(store, list.first, &result);
        for (struct write *w = list.first; w; w = w->next)
            w->result = result;
        pthread_mutex_lock(&store->mutex);
        store->failure = result;
        list_append(&store->finished, &list);
        uv_async_send(&store->wake);
    }
    store->ended = true;
    uv_async_send(&store->wake);
    pthread_mutex_unlock(&store->mutex);
    return NULL;
}

/* ---- the loop's side ---- */

static void on_wake(uv_async_t *handle)
{
    struct store *store = handle->data;
    pthread_mutex_lock(&store->mutex);
    struct write *w = list_take(&store->finished);
    bool ended = store->ended;
    pthread_mutex_unlock(&store->mutex);
    while (w) {
        struct write *next = w->next;
        pthread_mutex_lock(&store->mutex);
        store->waiting_bytes -= w->bytes;
        pthread_mutex_unlock(&store->mutex);
        if (w->done)
            w->done(&w->result, w->user);
        write_free(w);
        w = next;
    }
    if (ended && !uv_is_closing((uv_handle_t *)handle)) {
        pthread_join(store->writer, NULL);
        uv_close((uv_handle_t *)handle, on_free);
    }
}

void store_close(struct store *store, void (*on_closed)(void *user), void *user)
{
    store->on_closed = on_closed;
    store->closed_user = user;
    pthread_mutex_lock(&store->mutex);
    store->closing = true;
    pthread_cond_signal(&store->work);
    pthread_mutex_unlock(&store->mutex);
}

static uint8_t *pack(const ProtobufCMessage *message, size_t *ret_bytes)
{
    size_t bytes = protobuf_c_message_get_packed_size(message);
    uint8_t *data = malloc(bytes > 0 ? bytes : 1);
    if (data)
        *ret_bytes = protobuf_c_message_pack(message, data);
    return data;
}

/* A job's record has no spec, whatever the message has. */
static bool pack_record(struct write *w, const Tally__V1__Job *job)
{
    Tally__V1__Job record = *job;
    record.spec = NULL;
    w->state = (int)record.state;
    w->record = pack(&record.base, &w->record_bytes);
    return w->record != NULL;
}

static tally_status enqueue(struct store *store, struct write *w, struct tally_error *err)
{
    w->bytes = sizeof *w + w->record_bytes + w->spec_bytes + w->facts_bytes + (w->batch ? w->batch->bytes : 0);
    pthread_mutex_lock(&store->mutex);
    bool room = store->waiting_bytes < TALLY_STORE_QUEUE_BYTES;
    if (room) {
        struct write_list list = {.first = w, .end = &w->next};
        list_append(&store->waiting, &list);
        store->waiting_bytes += w->bytes;
        pthread_cond_signal(&store->work);
    }
    pthread_mutex_unlock(&store->mutex);
    if (room)
        return TALLY_OK;
    write_free(w);
    return tally_fail(err, TALLY_ENOMEM, "the disk of the state directory %s does not keep up: %u bytes wait for it",
                      store->directory, TALLY_STORE_QUEUE_BYTES);
}

static struct write *write_new(uint64_t job, struct event_batch *batch, store_done done, void *user)
{
    struct write *w = calloc(1, sizeof *w);
    if (!w)
        return NULL;
    w->job = job;
    w->batch = batch ? event_batch_ref(batch) : NULL;
    w->done = done;
    w->user = user;
    return w;
}

tally_status store_insert(struct store *store, const Tally__V1__Job *job, const char *request_id,
                          const Tally__V1__JobSpec *spec, const Tally__V1__DataFacts *facts, struct event_batch *batch,
                          store_done done, void *user, struct tally_error *err)
{
    struct write *w = write_new(job->id, batch, done, user);
    if (!w)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a job's record");
    w->request_id = strdup(request_id);
    w->spec = pack(&spec->base, &w->spec_bytes);
    w->facts = pack(&facts->base, &w->facts_bytes);
    if (!w->request_id || !w->spec || !w->facts || !pack_record(w, job)) {
        write_free(w);
        return tally_fail(err, TALLY_ENOMEM, "no memory for a job's record");
    }
    return enqueue(store, w, err);
}

tally_status store_update(struct store *store, uint64_t job_id, const Tally__V1__Job *job, struct event_batch *batch,
                          store_done done, void *user, struct tally_error *err)
{
    assert(!job || job->id == job_id);
    struct write *w = write_new(job_id, batch, done, user);
    if (!w || (job && !pack_record(w, job))) {
        if (w)
            write_free(w);
        return tally_fail(err, TALLY_ENOMEM, "no memory for a job's record");
    }
    return enqueue(store, w, err);
}

/* ---- reading ---- */

static tally_status read_statement(struct store *store, const char *sql, sqlite3_stmt **ret_statement,
                                   struct tally_error *err)
{
    int code = sqlite3_prepare_v2(store->read_db, sql, -1, ret_statement, NULL);
    return code == SQLITE_OK ? TALLY_OK : fail_sqlite(store, store->read_db, code, "cannot read the store", err);
}

static tally_status fail_damaged(const struct store *store, const char *what, uint64_t job, struct tally_error *err)
{
    return tally_fail(err, TALLY_EIO, "the store in %s is damaged: the %s of job %" PRIu64 " cannot be read",
                      store->directory, what, job);
}

static void *unpack_column(sqlite3_stmt *statement, int column, const ProtobufCMessageDescriptor *type)
{
    return protobuf_c_message_unpack(type, NULL, (size_t)sqlite3_column_bytes(statement, column),
                                     sqlite3_column_blob(statement, column));
}

tally_status store_load(struct store *store,
                        tally_status (*each)(const struct store_job *job, void *user, struct tally_error *err),
                        void *user, struct tally_error *err)
{
    sqlite3_stmt *statement = NULL;
    tally_status status =
        read_statement(store,
                       "SELECT id, request_id, record, (SELECT max(last) FROM events WHERE events.job = jobs.id) "
                       "FROM jobs ORDER BY id",
                       &statement, err);
    while (status == TALLY_OK) {
        int code = sqlite3_step(statement);
        if (code == SQLITE_DONE)
            break;
        if (code != SQLITE_ROW) {
            status = fail_sqlite(store, store->read_db, code, "cannot read the store", err);
            break;
        }
        struct store_job job = {
            .id = (uint64_t)sqlite3_column_int64(statement, 0),
            .request_id = (const char *)sqlite3_column_text(statement, 1),
            .job = unpack_column(statement, 2, &tally__v1__job__descriptor),
            .last_seq = (uint64_t)sqlite3_column_int64(statement, 3),
        };
        if (!job.job || !job.request_id) {
            protobuf_c_message_free_unpacked(job.job ? &job.job->base : NULL, NULL);
            status = fail_damaged(store, "record", job.id, err);
        } else {
            status = each(&job, user, err);
        }
    }
    sqlite3_finalize(statement);
    return status;
}

tally_status store_read_spec(struct store *store, uint64_t job, Tally__V1__JobSpec **ret_spec,
                             Tally__V1__DataFacts **ret_facts, struct tally_error *err)
{
    sqlite3_stmt *statement = NULL;
    Tally__V1__JobSpec *spec = NULL;
    Tally__V1__DataFacts *facts = NULL;
    tally_status status = read_statement(store, "SELECT spec, facts FROM jobs WHERE id = ?1", &statement, err);
    if (status != TALLY_OK)
        goto out;
    sqlite3_bind_int64(statement, 1, (sqlite3_int64)job);
    int code = sqlite3_step(statement);
    if (code == SQLITE_DONE) {
        status = tally_fail(err, TALLY_ENOTFOUND, "there is no job %" PRIu64, job);
    } else if (code != SQLITE_ROW) {
        status = fail_sqlite(store, store->read_db, code, "cannot read the store", err);
    } else {
        spec = unpack_column(statement, 0, &tally__v1__job_spec__descriptor);
        facts = unpack_column(statement, 1, &tally__v1__data_facts__descriptor);
        if (!spec || !facts)
            status = fail_damaged(store, "spec", job, err);
    }
    if (status == TALLY_OK) {
        *ret_spec = spec;
        spec = NULL;
        if (ret_facts) {
            *ret_facts = facts;
            facts = NULL;
        }
    }
out:
    protobuf_c_message_free_unpacked(spec ? &spec->base : NULL, NULL);
    protobuf_c_message_free_unpacked(facts ? &facts->base : NULL, NULL);
    sqlite3_finalize(statement);
    return status;
}

tally_status store_read_events(struct store *store, uint64_t job, uint64_t after, size_t max_bytes,
                               struct event_batch **ret_first, struct tally_error *err)
{
    struct event_batch *first = NULL, **end = &first;
    sqlite3_stmt *statement = NULL;
    tally_status status = read_statement(
        store, "SELECT first, last, body FROM events WHERE job = ?1 AND last > ?2 ORDER BY last", &statement, err);
    if (status != TALLY_OK)
        return status;
    sqlite3_bind_int64(statement, 1, (sqlite3_int64)job);
    /* Clients choose `after`; beyond SQLite's integers there is no event. */
    sqlite3_bind_int64(statement, 2, after > INT64_MAX ? INT64_MAX : (sqlite3_int64)after);
    size_t bytes = 0;
    while (status == TALLY_OK && bytes < max_bytes) {
        int code = sqlite3_step(statement);
        if (code == SQLITE_DONE)
            break;
        if (code != SQLITE_ROW) {
            status = fail_sqlite(store, store->read_db, code, "cannot read the store", err);
            break;
        }
        size_t size = (size_t)sqlite3_column_bytes(statement, 2);
        *end = event_batch_from((uint64_t)sqlite3_column_int64(statement, 0),
                                (uint64_t)sqlite3_column_int64(statement, 1), sqlite3_column_blob(statement, 2), size);
        if (!*end)
            status = tally_fail(err, TALLY_ENOMEM, "no memory for %zu bytes of events", size);
        else
            end = &(*end)->next;
        bytes += size;
    }
    sqlite3_finalize(statement);
    if (status == TALLY_OK) {
        *ret_first = first;
    } else {
        while (first) {
            struct event_batch *next = first->next;
            event_batch_unref(first);
            first = next;
        }
    }
    return status;
}
