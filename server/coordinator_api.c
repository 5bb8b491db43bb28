#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/message_copy.h"
#include "model/spec.h"
#include "server/coordinator_internal.h"

/* What a list may take of a message: the newest jobs that fit. */
#define LIST_MAX_BYTES (TALLY_MESSAGE_MAX_BYTES - (64u << 10))

static void reply_job(struct rpc_stream *stream, const struct job *job, Tally__V1__JobSpec *spec)
{
    Tally__V1__Job reply = *job->record;
    reply.spec = spec;
    rpc_stream_reply(stream, &reply.base);
}

/* ---- answering once what was decided is on disk ---- */

struct barrier {
    struct job *job;
    struct rpc_stream *stream;
};

static void on_durable(const struct tally_error *err, void *user)
{
    struct barrier barrier = *(struct barrier *)user;
    struct coordinator *c = barrier.job->coordinator;
    free(user);
    if (err->code == TALLY_OK)
        reply_job(barrier.stream, barrier.job, barrier.job->spec);
    else
        rpc_stream_finish_error(barrier.stream, err);
    coordinator_less_busy(c);
}

/* Writes are durable in order: an empty one behind the job's is told when those before it are. */
static void reply_when_durable(struct rpc_stream *stream, struct job *job)
{
    struct coordinator *c = job->coordinator;
    struct barrier *barrier = malloc(sizeof *barrier);
    struct tally_error err;
    tally_status status = barrier ? TALLY_OK : tally_fail(&err, TALLY_ENOMEM, "no memory to answer");
    if (barrier) {
        *barrier = (struct barrier){job, stream};
        status = store_update(c->store, job->record->id, NULL, NULL, on_durable, barrier, &err);
    }
    if (status == TALLY_OK) {
        c->busy++;
        return;
    }
    free(barrier);
    rpc_stream_finish_error(stream, &err);
}

/* ---- Submit ---- */

static struct job *find_request(const struct coordinator *c, const char *request_id)
{
    for (size_t i = c->job_count; i > 0; i--) {
        if (strcmp(c->jobs[i - 1]->request_id, request_id) == 0)
            return c->jobs[i - 1];
    }
    return NULL;
}

static tally_status check_submit(const struct coordinator *c, const Tally__V1__SubmitRequest *request,
                                 struct tally_error *err)
{
    uint32_t major = request->version ? request->version->major : 0,
             minor = request->version ? request->version->minor : 0;
    if (major != TALLY_PROTOCOL_MAJOR)
        return tally_fail(err, TALLY_ESTATE,
                          "the client speaks protocol version %" PRIu32 ".%" PRIu32 ", this coordinator %d.%d", major,
                          minor, TALLY_PROTOCOL_MAJOR, TALLY_PROTOCOL_MINOR);
    size_t length = strnlen(request->request_id, TALLY_REQUEST_ID_MAX + 1);
    if (length == 0 || length > TALLY_REQUEST_ID_MAX)
        return tally_fail(err, TALLY_EINVAL, "request_id: expected 1 to %d characters", TALLY_REQUEST_ID_MAX);
    if (!request->spec || !request->facts)
        return tally_fail(err, TALLY_EINVAL, "a job needs its spec and the facts of its data");
    if (c->store_failure.code != TALLY_OK)
        return tally_fail(err, TALLY_EIO, "the coordinator takes no jobs: %s", c->store_failure.message);
    return TALLY_OK;
}

static tally_status check_room(const struct coordinator *c, struct tally_error *err)
{
    if (c->job_count >= TALLY_JOBS_MAX)
        return tally_fail(err, TALLY_ENOMEM, "this coordinator keeps %zu jobs, as many as it can", c->job_count);
    if (c->live_jobs >= TALLY_JOBS_LIVE_MAX)
        return tally_fail(err, TALLY_ENOMEM, "%zu jobs wait or run already, as many as this coordinator takes",
                          c->live_jobs);
    return TALLY_OK;
}

/* Copies of what the client sent, checked and with defaults. */
static tally_status take_spec(const Tally__V1__SubmitRequest *request, Tally__V1__JobSpec **ret_spec,
                              Tally__V1__DataFacts **ret_facts, struct tally_error *err)
{
    Tally__V1__JobSpec *spec = message_copy(&request->spec->base);
    Tally__V1__DataFacts *facts = message_copy(&request->facts->base);
    tally_status status =
        spec && facts ? job_spec_check(spec, facts, err) : tally_fail(err, TALLY_ENOMEM, "no memory for a job");
    if (status == TALLY_OK && tally__v1__job_spec__get_packed_size(spec) > TALLY_SPEC_MAX_BYTES)
        status = tally_fail(err, TALLY_EINVAL, "the job's spec is larger than %u bytes", TALLY_SPEC_MAX_BYTES);
    if (status != TALLY_OK) {
        tally__v1__job_spec__free_unpacked(spec, NULL);
        tally__v1__data_facts__free_unpacked(facts, NULL);
        return status;
    }
    *ret_spec = spec;
    *ret_facts = facts;
    return TALLY_OK;
}

static Tally__V1__Job *new_record(uint64_t id, const char *name)
{
    Tally__V1__Job *record = malloc(sizeof *record);
    if (!record)
        return NULL;
    tally__v1__job__init(record);
    record->id = id;
    record->state = TALLY__V1__JOB_STATE__QUEUED;
    record->submitted_unix_ms = tally_unix_ms();
    record->name = strdup(name ? name : "");
    record->reason = strdup("is queued");
    if (record->name && record->reason)
        return record;
    if (!record->name)
        record->name = (char *)(uintptr_t)protobuf_c_empty_string;
    if (!record->reason)
        record->reason = (char *)(uintptr_t)protobuf_c_empty_string;
    tally__v1__job__free_unpacked(record, NULL);
    return NULL;
}

static tally_status make_job(struct coordinator *c, const Tally__V1__SubmitRequest *request, struct job **ret_job,
                             struct tally_error *err)
{
    Tally__V1__JobSpec *spec = NULL;
    Tally__V1__DataFacts *facts = NULL;
    tally_status status = check_room(c, err);
    if (status == TALLY_OK)
        status = take_spec(request, &spec, &facts, err);
    if (status != TALLY_OK)
        return status;
    Tally__V1__Job *record = new_record(c->next_job, spec->name);
    if (!record) {
        tally__v1__job_spec__free_unpacked(spec, NULL);
        tally__v1__data_facts__free_unpacked(facts, NULL);
        return tally_fail(err, TALLY_ENOMEM, "no memory for a job");
    }
    struct job *job = NULL;
    status = job_new(c, record, request->request_id, spec, facts, &job, err);
    if (status != TALLY_OK)
        return status;
    status = coordinator_add_job(c, job, err);
    if (status != TALLY_OK) {
        job_free(job);
        return status;
    }
    Tally__V1__StateChange change = TALLY__V1__STATE_CHANGE__INIT;
    change.state = record->state;
    change.reason = record->reason;
    Tally__V1__Event event = TALLY__V1__EVENT__INIT;
    event.body_case = TALLY__V1__EVENT__BODY_STATE;
    event.state = &change;
    job_event(job, &event);
    status = job_commit(job, err);
    if (status != TALLY_OK) {
        coordinator_drop_job(c, job);
        return status;
    }
    c->next_job++;
    log_info("job %" PRIu64 " %s submitted: %" PRIu64 " steps", job->record->id, job->record->name, job->record->steps);
    *ret_job = job;
    return TALLY_OK;
}

static void on_submit(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct coordinator *c = user;
    const Tally__V1__SubmitRequest *request = (const Tally__V1__SubmitRequest *)message->header;
    struct tally_error err;
    tally_status status = check_submit(c, request, &err);
    struct job *job = status == TALLY_OK ? find_request(c, request->request_id) : NULL;
    if (status == TALLY_OK && !job)
        status = make_job(c, request, &job, &err);
    if (status == TALLY_OK)
        reply_when_durable(stream, job);
    else
        rpc_stream_finish_error(stream, &err);
}

/* ---- Get ---- */

/* A job that has ended is read from the store: its spec is not kept in memory. */
struct read_spec {
    uv_work_t work;
    struct coordinator *coordinator;
    struct rpc_stream *stream;
    uint64_t job;
    Tally__V1__JobSpec *spec;
    struct tally_error err;
};

static void read_spec_work(uv_work_t *work)
{
    struct read_spec *r = work->data;
    store_read_spec(r->coordinator->store, r->job, &r->spec, NULL, &r->err);
}

static void read_spec_done(uv_work_t *work, int cancelled)
{
    struct read_spec *r = work->data;
    struct coordinator *c = r->coordinator;
    struct job *job = coordinator_find_job(c, r->job);
    (void)cancelled; /* nobody cancels it */
    if (r->spec && job)
        reply_job(r->stream, job, r->spec);
    else
        rpc_stream_finish_error(r->stream, &r->err);
    tally__v1__job_spec__free_unpacked(r->spec, NULL);
    free(r);
    coordinator_less_busy(c);
}

static struct job *find_or_finish(struct coordinator *c, uint64_t id, struct rpc_stream *stream)
{
    struct job *job = coordinator_find_job(c, id);
    if (job)
        return job;
    struct tally_error err;
    tally_fail(&err, TALLY_ENOTFOUND, "there is no job %" PRIu64, id);
    rpc_stream_finish_error(stream, &err);
    return NULL;
}

static void on_get(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct coordinator *c = user;
    struct job *job = find_or_finish(c, ((const Tally__V1__JobRef *)message->header)->id, stream);
    if (!job)
        return;
    if (job->spec) {
        reply_job(stream, job, job->spec);
        return;
    }
    struct read_spec *r = c->closing ? NULL : calloc(1, sizeof *r);
    if (!r) {
        rpc_stream_finish(stream, c->closing ? TALLY_EUNAVAIL : TALLY_ENOMEM,
                          c->closing ? "the coordinator is ending" : "no memory to answer");
        return;
    }
    r->work.data = r;
    r->coordinator = c;
    r->stream = stream;
    r->job = job->record->id;
    if (uv_queue_work(c->loop, &r->work, read_spec_work, read_spec_done) != 0) {
        free(r);
        rpc_stream_finish(stream, TALLY_EINTERNAL, "the job cannot be read");
        return;
    }
    c->busy++;
}

/* ---- List ---- */

static void on_list(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct coordinator *c = user;
    (void)message;
    Tally__V1__ListReply reply = TALLY__V1__LIST_REPLY__INIT;
    reply.jobs = calloc(c->job_count > 0 ? c->job_count : 1, sizeof *reply.jobs);
    if (!reply.jobs) {
        rpc_stream_finish(stream, TALLY_ENOMEM, "no memory to answer");
        return;
    }
    size_t bytes = 0;
    for (size_t i = c->job_count; i > 0; i--) {
        Tally__V1__Job *record = c->jobs[i - 1]->record;
        bytes += tally__v1__job__get_packed_size(record) + 16;
        if (bytes > LIST_MAX_BYTES)
            break;
        reply.jobs[reply.n_jobs++] = record;
    }
    rpc_stream_reply(stream, &reply.base);
    free(reply.jobs);
}

/* ---- Stop ---- */

static void on_stop(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct coordinator *c = user;
    const Tally__V1__StopRequest *request = (const Tally__V1__StopRequest *)message->header;
    struct job *job = find_or_finish(c, request->job, stream);
    if (!job)
        return;
    if (!c->closing)
        job_apply(job, JOB_EVENT_STOP, "a stop was asked for%s%.200s", request->reason[0] ? ": " : "", request->reason);
    reply_when_durable(stream, job);
}

const struct rpc_method jobs_methods[] = {
    {.name = "Submit", .on_request = on_submit}, {.name = "Get", .on_request = on_get},
    {.name = "List", .on_request = on_list},     {.name = "Watch", .on_request = watch_request},
    {.name = "Stop", .on_request = on_stop},     {.name = "Results", .on_request = download_request},
};
const size_t jobs_method_count = sizeof jobs_methods / sizeof jobs_methods[0];
