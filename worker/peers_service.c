#include "worker/peers_service.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/clock.h"
#include "common/limits.h"
#include "common/log.h"
#include "proto/peers.pb-c.h"

/* Streams that no job has taken yet: one a peer, of the job that is about to begin; and strays. */
#define WAITING_MAX TALLY_NODES_MAX
/* From its open to a stream's first message; from that to its job's being opened here: data may be long to read, and
 * who waits on the other side has a deadline of its own. */
#define HELLO_NS (INT64_C(10) * 1000000000)
#define ADOPT_NS (INT64_C(600) * 1000000000)
/* Jobs whose end is remembered. */
#define ENDED_MAX 64

struct inlet {
    struct inlet *next;
    struct peers_service *service;
    struct rpc_stream *stream;
    struct peers_listener *listener; /* NULL: none yet, or none any more */
    void *user;                      /* the listener's */
    uint64_t job, generation;
    char from[TALLY_NODE_NAME_MAX + 1];
    bool greeted, finished;
    int64_t since_ns;
    struct tally_error fault; /* why it was ended here */
};

struct ended {
    uint64_t job, generation;
};

struct peers_service {
    struct rpc_queue *queue;
    struct peers_listener *listener; /* NULL: no job */
    struct inlet *inlets;
    unsigned waiting; /* without a listener and not finished */
    struct ended ended[ENDED_MAX];
    unsigned ended_next;
};

tally_status peers_service_new(struct rpc_queue *data_queue, struct peers_service **ret_service,
                               struct tally_error *err)
{
    struct peers_service *s = calloc(1, sizeof *s);
    if (!s)
        return tally_fail(err, TALLY_ENOMEM, "no memory for the peers' service");
    s->queue = data_queue;
    *ret_service = s;
    return TALLY_OK;
}

void peers_service_free(struct peers_service *s)
{
    assert(!s || !s->inlets);
    free(s);
}

/* ---- streams ---- */

static void finish(struct inlet *in, const struct tally_error *why)
{
    if (in->finished)
        return;
    in->finished = true;
    in->fault = *why;
    if (!in->listener)
        in->service->waiting--;
    rpc_stream_finish_error(in->stream, why);
}

static void sweep(struct peers_service *s)
{
    int64_t now = tally_now_ns();
    struct tally_error err;
    for (struct inlet *in = s->inlets; in; in = in->next) {
        if (in->finished || in->listener || now - in->since_ns < (in->greeted ? ADOPT_NS : HELLO_NS))
            continue;
        if (in->greeted)
            tally_fail(&err, TALLY_ETIMEDOUT, "job %" PRIu64 " was not opened here within %d s", in->job,
                       (int)(ADOPT_NS / 1000000000));
        else
            tally_fail(&err, TALLY_ETIMEDOUT, "no first message came within %d s", (int)(HELLO_NS / 1000000000));
        finish(in, &err);
    }
}

static void adopt(struct inlet *in, struct peers_listener *listener)
{
    struct tally_error err;
    tally_status status = listener->on_open(listener, in->stream, in->from, &in->user, &err);
    if (status) {
        log_debug("refused a stream of worker %s: %s", in->from, err.message);
        finish(in, &err);
        return;
    }
    in->service->waiting--;
    in->listener = listener;
}

static tally_status check_generation(const struct peers_service *s, const struct inlet *in, struct tally_error *err)
{
    uint64_t newest = 0;
    for (unsigned i = 0; i < ENDED_MAX; i++)
        if (s->ended[i].job == in->job && s->ended[i].generation > newest)
            newest = s->ended[i].generation;
    if (newest >= in->generation)
        return tally_fail(err, TALLY_ESTATE, "generation %" PRIu64 " of job %" PRIu64 " has ended at this worker",
                          in->generation, in->job);
    if (s->listener && s->listener->job == in->job && s->listener->generation > in->generation)
        return tally_fail(err, TALLY_ESTATE,
                          "generation %" PRIu64 " of job %" PRIu64 ": this worker is at generation %" PRIu64,
                          in->generation, in->job, s->listener->generation);
    return TALLY_OK;
}

static tally_status check_hello(const struct inlet *in, const Tally__V1__TensorMessage *hello, size_t bytes,
                                struct tally_error *err)
{
    uint32_t major = hello->version ? hello->version->major : 0, minor = hello->version ? hello->version->minor : 0;
    if (!hello->from[0] || !hello->version || bytes > 0 || hello->job == 0 || hello->generation == 0)
        return tally_fail(
            err, TALLY_EINVAL,
            "the first message of an Exchange must say who speaks (from), its protocol's version, job and "
            "generation, and carry no tensor");
    if (major != TALLY_PROTOCOL_MAJOR)
        return tally_fail(err, TALLY_ESTATE,
                          "worker %.*s speaks protocol %" PRIu32 ".%" PRIu32 ", this worker speaks %d.%d",
                          TALLY_NODE_NAME_MAX, hello->from, major, minor, TALLY_PROTOCOL_MAJOR, TALLY_PROTOCOL_MINOR);
    return check_generation(in->service, in, err);
}

static void on_hello(struct inlet *in, const Tally__V1__TensorMessage *hello, size_t bytes)
{
    struct peers_service *s = in->service;
    struct tally_error err;
    in->greeted = true;
    in->job = hello->job;
    in->generation = hello->generation;
    snprintf(in->from, sizeof in->from, "%s", hello->from);
    tally_status status = check_hello(in, hello, bytes, &err);
    if (status)
        finish(in, &err);
    else if (s->listener && s->listener->job == in->job && s->listener->generation == in->generation)
        adopt(in, s->listener);
}

static void on_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    (void)stream;
    struct inlet *in = user;
    const Tally__V1__TensorMessage *tensor = (const Tally__V1__TensorMessage *)message->header;
    struct tally_error err;
    if (in->finished)
        return;
    if (!in->greeted)
        on_hello(in, tensor, rpc_payload_bytes(message->payload));
    else if (in->listener && in->listener->on_message(in->user, message, &err))
        finish(in, &err);
}

static void on_half_close(struct rpc_stream *stream, void *user)
{
    (void)stream;
    struct tally_error err = {0}; /* TALLY_OK */
    finish(user, &err);
}

static void on_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    struct inlet *in = user;
    struct peers_service *s = in->service;
    struct inlet **at = &s->inlets;
    while (*at != in)
        at = &(*at)->next;
    *at = in->next;
    if (in->listener)
        in->listener->on_end(in->user, in->finished ? &in->fault : end);
    else if (!in->finished)
        s->waiting--;
    free(in);
}

static void on_open(struct rpc_stream *stream, void *user)
{
    static const struct rpc_stream_events events = {
        .on_message = on_message, .on_half_close = on_half_close, .on_end = on_end};
    /* Acknowledgements: as many as there was room for, at most. */
    static const struct rpc_stream_options options = {.credits = 1, .max_queued_messages = UINT16_MAX};
    struct peers_service *s = user;
    sweep(s);
    struct inlet *in = s->waiting < WAITING_MAX ? calloc(1, sizeof *in) : NULL;
    if (!in) {
        rpc_stream_finish(stream, TALLY_ENOMEM, "no memory for a peer's stream");
        return;
    }
    in->service = s;
    in->stream = stream;
    in->since_ns = tally_now_ns();
    in->next = s->inlets;
    s->inlets = in;
    s->waiting++;
    rpc_stream_accept(stream, &events, in, &options);
}

tally_status peers_service_serve(struct peers_service *s, struct rpc_server *server, struct tally_error *err)
{
    static const struct rpc_method methods[] = {{.name = "Exchange", .on_open = on_open}};
    const struct rpc_service service = {.descriptor = &tally__v1__peers__descriptor,
                                        .queue = s->queue,
                                        .methods = methods,
                                        .method_count = sizeof methods / sizeof *methods,
                                        .user = s};
    return rpc_server_add(server, &service, err);
}

/* ---- jobs ---- */

void peers_service_add(struct peers_service *s, struct peers_listener *listener)
{
    assert(!s->listener);
    struct tally_error err;
    s->listener = listener;
    for (struct inlet *in = s->inlets; in; in = in->next) {
        if (in->finished || !in->greeted || in->listener || in->job != listener->job)
            continue;
        if (check_generation(s, in, &err))
            finish(in, &err);
        else if (in->generation == listener->generation)
            adopt(in, listener);
    }
}

void peers_service_remove(struct peers_service *s, struct peers_listener *listener)
{
    if (s->listener != listener)
        return;
    struct tally_error err;
    tally_fail(&err, TALLY_ECANCELLED, "job %" PRIu64 " was ended at this worker", listener->job);
    for (struct inlet *in = s->inlets; in; in = in->next) {
        if (in->listener != listener)
            continue;
        finish(in, &err);
        in->listener = NULL;
    }
    s->listener = NULL;
    s->ended[s->ended_next++ % ENDED_MAX] = (struct ended){listener->job, listener->generation};
}
