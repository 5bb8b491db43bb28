/*
 * DESIGN. Everything runs on the loop's thread, so there are no locks. A node is always in one state:
 *
 *   JOINING     a stream was opened and Register sent; Registered must come within NODE_ANSWER_MS
 *   REGISTERED  beats every third of the lease; a beat that is acknowledged renews the lease from when it was sent
 *   WAITING     no stream; the next attempt comes after a pause that doubles up to NODE_RETRY_MAX_MS
 *   FAILED      on_failed was called; only node_close is left to do
 *   CLOSING     node_close was called; it ends when the stream and the timer have
 *
 * One timer serves all states: it is armed for the next thing that falls due. A stream that was given up goes on to its
 * on_end beside the next one; `stream` is the current one, and `live_streams` says what node_close must wait for.
 */
#include "cluster/node.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/limits.h"

#define NODE_ANSWER_MS 5000 /* a coordinator that is there answers Register at once: it only looks at its table */
#define NODE_RETRY_MIN_MS 50
#define NODE_RETRY_MAX_MS 2000 /* also how long a returned coordinator waits for its nodes */
#define NODE_CLOSE_MS 1000     /* for what is queued (Ended, JobFailed) to go out */
#define NODE_CREDITS 16        /* orders are few; each is granted again when it has been handled */
#define NODE_QUEUED_MESSAGES 1024
#define NODE_BEATS_MAX 16 /* beats under way: three a lease, and a lease without an answer ends it */
#define NODE_LEASE_MIN_MS 30
#define NODE_ACTIVITY_BYTES 512

enum node_state { NODE_JOINING, NODE_REGISTERED, NODE_WAITING, NODE_FAILED, NODE_CLOSING };

struct node {
    struct rpc_queue *queue;
    struct node_options options; /* its strings are ours */
    struct node_events events;
    void *user;
    enum node_state state;
    uv_timer_t timer;
    bool timer_closed;
    struct rpc_stream *stream; /* current; NULL: none */
    struct rpc_channel *channel;
    unsigned live_streams; /* opened, on_end not seen */
    bool was_registered;   /* at some time */
    int64_t unreached_since_ms;
    int64_t answer_by_ms; /* JOINING */
    int64_t retry_ms;     /* the next pause */
    int64_t lease_ms, last_lease_ms;
    int64_t lease_until_ms, next_beat_ms; /* REGISTERED */
    uint64_t seq;                         /* of the last beat */
    uint64_t acked;
    int64_t sent_ms[NODE_BEATS_MAX]; /* by seq */
    void (*on_closed)(void *user);
    void *closed_user;
};

static void node_join(struct node *node);
static void node_on_timer(uv_timer_t *timer);

static int64_t now_ms(void)
{
    return tally_now_ns() / 1000000;
}

/* uv's own idea of now may be old by as long as the callbacks before us took. */
static void node_arm(struct node *node, int64_t at_ms)
{
    int64_t wait = at_ms - now_ms();
    uv_update_time(node->timer.loop);
    uv_timer_start(&node->timer, node_on_timer, wait > 0 ? (uint64_t)wait : 0, 0);
}

static void node_options_free(struct node_options *options)
{
    free((char *)options->name);
    free((char *)options->coordinator);
    free((char *)options->address);
    free((char *)options->backend);
    free((char *)options->isa);
}

static bool copy_text(const char **copy, const char *text)
{
    *copy = text ? strdup(text) : NULL;
    return *copy || !text;
}

static bool node_options_copy(struct node_options *copy, const struct node_options *options)
{
    *copy = *options;
    copy->name = copy->coordinator = copy->address = copy->backend = copy->isa = NULL;
    return copy_text(&copy->name, options->name) && copy_text(&copy->coordinator, options->coordinator) &&
           copy_text(&copy->address, options->address) && copy_text(&copy->backend, options->backend) &&
           copy_text(&copy->isa, options->isa);
}

static void node_maybe_free(struct node *node)
{
    if (node->state != NODE_CLOSING || node->live_streams || !node->timer_closed)
        return;
    void (*on_closed)(void *) = node->on_closed;
    void *user = node->closed_user;
    rpc_channel_free(node->channel);
    node_options_free(&node->options);
    free(node);
    if (on_closed)
        on_closed(user);
}

static void node_fail(struct node *node, const struct tally_error *why)
{
    node->state = NODE_FAILED;
    uv_timer_stop(&node->timer);
    node->events.on_failed(node, why, node->user);
}

/* The attempt or the lease is over: gives the stream up, says so, and tries again or fails. */
static void node_lost(struct node *node, const struct tally_error *why)
{
    bool registered = node->state == NODE_REGISTERED;
    struct rpc_stream *stream = node->stream;
    node->stream = NULL;
    if (stream)
        rpc_stream_cancel(stream);
    rpc_channel_free(node->channel);
    node->channel = NULL;
    node->state = NODE_WAITING;
    if (registered) {
        node->unreached_since_ms = now_ms();
        node->events.on_lost(node, why, node->user);
        if (node->state != NODE_WAITING) /* it was closed in there */
            return;
    }
    int64_t unreached = now_ms() - node->unreached_since_ms;
    if (node->options.join_timeout_ms && unreached >= node->options.join_timeout_ms) {
        struct tally_error err;
        tally_fail(&err, TALLY_ETIMEDOUT, "the coordinator at %s could not be reached within %" PRId64 " ms: %s",
                   node->options.coordinator, node->options.join_timeout_ms, why->message);
        node_fail(node, &err);
        return;
    }
    int64_t at = now_ms() + node->retry_ms;
    if (node->options.join_timeout_ms && at > node->unreached_since_ms + node->options.join_timeout_ms)
        at = node->unreached_since_ms + node->options.join_timeout_ms;
    node->retry_ms = node->retry_ms * 2 < NODE_RETRY_MAX_MS ? node->retry_ms * 2 : NODE_RETRY_MAX_MS;
    node_arm(node, at);
}

static void node_beat(struct node *node)
{
    char activity[NODE_ACTIVITY_BYTES] = "";
    if (node->events.activity)
        node->events.activity(node, activity, sizeof activity, node->user);
    activity[sizeof activity - 1] = 0;
    Tally__V1__Heartbeat beat = TALLY__V1__HEARTBEAT__INIT;
    beat.seq = ++node->seq;
    beat.activity = activity;
    Tally__V1__NodeMessage message = TALLY__V1__NODE_MESSAGE__INIT;
    message.body_case = TALLY__V1__NODE_MESSAGE__BODY_HEARTBEAT;
    message.heartbeat = &beat;
    node->sent_ms[node->seq % NODE_BEATS_MAX] = now_ms();
    node->next_beat_ms = now_ms() + node->lease_ms / 3;
    /* A beat that cannot be sent is a beat that is not acknowledged: the lease decides. */
    (void)rpc_stream_send(node->stream, &message.base, NULL);
}

static void node_arm_registered(struct node *node)
{
    node_arm(node, node->next_beat_ms < node->lease_until_ms ? node->next_beat_ms : node->lease_until_ms);
}

static void node_on_timer(uv_timer_t *timer)
{
    struct node *node = timer->data;
    struct tally_error err;
    switch (node->state) {
    case NODE_JOINING:
        tally_fail(&err, TALLY_ETIMEDOUT, "the coordinator at %s did not answer Register within %d ms",
                   node->options.coordinator, NODE_ANSWER_MS);
        node_lost(node, &err);
        break;
    case NODE_REGISTERED:
        if (now_ms() >= node->lease_until_ms) {
            tally_fail(&err, TALLY_ETIMEDOUT,
                       "the coordinator at %s acknowledged no heartbeat for a lease of %" PRId64 " ms",
                       node->options.coordinator, node->lease_ms);
            node_lost(node, &err);
            break;
        }
        if (now_ms() >= node->next_beat_ms)
            node_beat(node);
        node_arm_registered(node);
        break;
    case NODE_WAITING:
        node_join(node);
        break;
    case NODE_FAILED:
    case NODE_CLOSING:
        break;
    }
}

static void node_registered(struct node *node, const Tally__V1__Registered *registered)
{
    node->lease_ms = registered->lease_ms ? (int64_t)registered->lease_ms : TALLY_LEASE_MS;
    if (node->lease_ms < NODE_LEASE_MIN_MS)
        node->lease_ms = NODE_LEASE_MIN_MS;
    node->last_lease_ms = node->lease_ms;
    node->lease_until_ms = now_ms() + node->lease_ms;
    node->state = NODE_REGISTERED;
    node->was_registered = true;
    node->retry_ms = NODE_RETRY_MIN_MS;
    node->seq = node->acked = 0;
    node_beat(node);
    node_arm_registered(node);
    node->events.on_registered(node, node->user);
}

static void node_acknowledged(struct node *node, uint64_t seq)
{
    if (node->state != NODE_REGISTERED || seq <= node->acked || seq > node->seq || node->seq - seq >= NODE_BEATS_MAX)
        return;
    node->acked = seq;
    node->lease_until_ms = node->sent_ms[seq % NODE_BEATS_MAX] + node->lease_ms;
    node_arm_registered(node);
}

static void node_on_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct node *node = user;
    if (stream != node->stream)
        return;
    rpc_stream_grant(stream, 1);
    const Tally__V1__Order *order = (const Tally__V1__Order *)message->header;
    switch (order->body_case) {
    case TALLY__V1__ORDER__BODY_REGISTERED:
        if (node->state == NODE_JOINING)
            node_registered(node, order->registered);
        break;
    case TALLY__V1__ORDER__BODY_HEARTBEAT_ACK:
        node_acknowledged(node, order->heartbeat_ack->seq);
        break;
    case TALLY__V1__ORDER__BODY_OPEN_JOB:
    case TALLY__V1__ORDER__BODY_ASSIGN:
    case TALLY__V1__ORDER__BODY_END_JOB:
    case TALLY__V1__ORDER__BODY_SHUTDOWN:
        if (node->state == NODE_REGISTERED)
            node->events.on_order(node, order, node->user);
        break;
    default: /* of a newer minor version */
        break;
    }
}

/*
 * Did the coordinator refuse us, so that asking again is no use? Where we were registered before, the refusal may be of
 * our own last incarnation, which the coordinator takes for alive until its lease has passed.
 */
static bool node_refused(const struct node *node, const struct tally_error *end)
{
    bool refused = end->code == TALLY_ESTATE || end->code == TALLY_EINVAL || end->code == TALLY_EEXIST ||
                   end->code == TALLY_EDENIED || end->code == TALLY_EUNSUPPORTED;
    return refused && (!node->was_registered || now_ms() - node->unreached_since_ms > 2 * node->last_lease_ms);
}

static void node_on_timer_closed(uv_handle_t *handle)
{
    struct node *node = handle->data;
    node->timer_closed = true;
    node_maybe_free(node);
}

static void node_stream_ended(struct node *node, const struct tally_error *end)
{
    struct tally_error err;
    if (node->state == NODE_CLOSING) {
        if (!uv_is_closing((uv_handle_t *)&node->timer))
            uv_close((uv_handle_t *)&node->timer, node_on_timer_closed);
    } else if (node->state == NODE_JOINING && node_refused(node, end)) {
        tally_fail(&err, end->code, "the coordinator at %s refused %s: %s", node->options.coordinator,
                   node->options.name, end->message);
        node_fail(node, &err);
    } else {
        if (end->code == TALLY_OK)
            tally_fail(&err, TALLY_EUNAVAIL, "the coordinator at %s ended the stream", node->options.coordinator);
        else if (node->state == NODE_JOINING)
            err = *end;
        else
            tally_fail(&err, end->code, "the stream to the coordinator at %s was lost: %s", node->options.coordinator,
                       end->message);
        node_lost(node, &err);
    }
}

static void node_on_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    struct node *node = user;
    node->live_streams--;
    if (stream == node->stream) {
        node->stream = NULL;
        node_stream_ended(node, end);
    }
    node_maybe_free(node);
}

static tally_status node_send_register(struct node *node, struct tally_error *err)
{
    Tally__V1__Version version = TALLY__V1__VERSION__INIT;
    version.major = TALLY_PROTOCOL_MAJOR;
    version.minor = TALLY_PROTOCOL_MINOR;
    Tally__V1__Register reg = TALLY__V1__REGISTER__INIT;
    reg.version = &version;
    reg.role = node->options.role;
    reg.name = (char *)node->options.name;
    reg.address = (char *)node->options.address;
    reg.pid = (uint32_t)getpid();
    if (node->options.backend)
        reg.backend = (char *)node->options.backend;
    if (node->options.isa)
        reg.isa = (char *)node->options.isa;
    if (getrandom(&reg.incarnation, sizeof reg.incarnation, 0) != (ssize_t)sizeof reg.incarnation)
        return tally_fail_errno(err, "cannot draw a random incarnation");
    Tally__V1__NodeMessage message = TALLY__V1__NODE_MESSAGE__INIT;
    message.body_case = TALLY__V1__NODE_MESSAGE__BODY_REGISTER;
    message.register_ = &reg;
    return rpc_stream_send(node->stream, &message.base, err);
}

static tally_status node_connect(struct node *node, struct tally_error *err)
{
    /* A connection of its own for each attempt: one that is shared carries the back-off of the attempt before. */
    struct rpc_channel_options channel_options = {.own_connection = true};
    tally_status status = rpc_channel_new(node->options.coordinator, &channel_options, &node->channel, err);
    if (status)
        return status;
    static const struct rpc_stream_events events = {.on_message = node_on_message, .on_end = node_on_end};
    struct rpc_stream_options options = {.credits = NODE_CREDITS, .max_queued_messages = NODE_QUEUED_MESSAGES};
    status = rpc_stream_open(node->channel, node->queue, &tally__v1__cluster__descriptor, "Join", &events, node,
                             &options, &node->stream, err);
    if (status)
        return status;
    node->live_streams++;
    return node_send_register(node, err);
}

static void node_join(struct node *node)
{
    struct tally_error err;
    node->state = NODE_JOINING;
    /* TALLY_ECANCELLED: the stream is ending already; on_end tells why. */
    tally_status status = node_connect(node, &err);
    if (status && status != TALLY_ECANCELLED) {
        node_lost(node, &err);
        return;
    }
    node_arm(node, now_ms() + NODE_ANSWER_MS);
}

tally_status node_open(struct rpc_queue *queue, uv_loop_t *loop, const struct node_options *options,
                       const struct node_events *events, void *user, struct node **ret_node, struct tally_error *err)
{
    assert(events->on_registered && events->on_order && events->on_lost && events->on_failed);
    struct node *node = calloc(1, sizeof *node);
    if (!node)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a node");
    if (!node_options_copy(&node->options, options)) {
        node_options_free(&node->options);
        free(node);
        return tally_fail(err, TALLY_ENOMEM, "no memory for a node");
    }
    /* An address that cannot be right is told now, not tried for ever. */
    struct rpc_channel *probe;
    tally_status status = rpc_channel_new(options->coordinator, NULL, &probe, err);
    if (status) {
        node_options_free(&node->options);
        free(node);
        return status;
    }
    rpc_channel_free(probe);
    node->queue = queue;
    node->events = *events;
    node->user = user;
    node->retry_ms = NODE_RETRY_MIN_MS;
    node->unreached_since_ms = now_ms();
    node->state = NODE_WAITING;
    uv_timer_init(loop, &node->timer);
    node->timer.data = node;
    node_arm(node, now_ms()); /* the first attempt also comes out of the loop: no callback before we return */
    *ret_node = node;
    return TALLY_OK;
}

tally_status node_send(struct node *node, const Tally__V1__NodeMessage *message, struct tally_error *err)
{
    if (node->state != NODE_REGISTERED || !node->stream)
        return tally_fail(err, TALLY_EUNAVAIL, "%s is not registered with a coordinator", node->options.name);
    struct tally_error why;
    tally_status status = rpc_stream_send(node->stream, &message->base, &why);
    if (status)
        return tally_fail(err, status, "cannot send to the coordinator at %s: %s", node->options.coordinator,
                          why.message);
    return TALLY_OK;
}

static void node_on_close_timer(uv_timer_t *timer)
{
    struct node *node = timer->data;
    if (node->stream)
        rpc_stream_cancel(node->stream);
    uv_close((uv_handle_t *)timer, node_on_timer_closed);
}

void node_close(struct node *node, void (*on_closed)(void *user), void *user)
{
    assert(node->state != NODE_CLOSING);
    node->state = NODE_CLOSING;
    node->on_closed = on_closed;
    node->closed_user = user;
    if (node->stream)
        rpc_stream_close(node->stream);
    uv_timer_stop(&node->timer);
    uv_update_time(node->timer.loop);
    uv_timer_start(&node->timer, node_on_close_timer, node->stream ? NODE_CLOSE_MS : 0, 0);
}
