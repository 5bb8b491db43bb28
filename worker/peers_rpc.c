/*
 * DESIGN. Two threads meet here, as in transport_rpc.c: the compute thread calls the peers' functions, the data thread
 * runs the streams' callbacks (they are one and the same where on_data_thread is set: then a wait polls).
 *
 * Sending: an outlet has a parcel for each tensor that may be on its way. The compute thread fills it, gives its parts
 * to the stream by reference and forgets it; the release callbacks, on whatever thread, count the parts down to 0.
 * Credits come with the receiver's acknowledgements (data thread).
 *
 * Receiving: an inlet has a letter for each tensor that may lie here. The data thread fills an empty one with the
 * payloads' references, part by part; when it is full it belongs to the compute thread, which copies it where it is
 * wanted, empties it, and grants the sender its credit again. So what is sent within the room leaves the sender's
 * memory whether or not the receiver is computing.
 *
 * The tensors of an edge are sent in order (steps, an evaluation behind its step, micro-batches), so that what comes
 * again is known by its number.
 *
 * A stream that is lost fails the job, but a moment later only: where the other's job or process has ended, its own
 * reason, or the coordinator's, is the better one, and the job is ended by it meanwhile.
 */
#include "worker/peers_rpc.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "worker/peers_rpc_build.h"

#define ACK_CREDITS 64      /* acknowledgements that may come at once; each is a few bytes */
#define LOST_GRACE_MS 1500  /* for the reason of a loss to come by itself */
#define CLOSE_WAIT_MS 10000 /* a cancelled stream ends as soon as the data thread polls */

/* ---- sending ---- */

/* A part's bytes have left. Any thread. */
static void on_release(void *user)
{
    struct peers_parcel *parcel = user;
    struct peers_rpc *p = parcel->p;
    wait_begin_change(&p->wait);
    atomic_fetch_sub(&parcel->parts, 1);
    atomic_fetch_sub(&p->pending, 1);
    wait_end_change(&p->wait); /* p may be freed from here on */
}

static tally_status send_part(struct peers_outlet *out, struct peers_parcel *parcel, const struct peer_tensor *tensor,
                              const float *data, size_t offset, size_t count, struct tally_error *err)
{
    struct peers_rpc *p = out->p;
    Tally__V1__TensorMessage header = TALLY__V1__TENSOR_MESSAGE__INIT;
    Tally__V1__Sums sums = TALLY__V1__SUMS__INIT;
    header.job = p->options.job;
    header.generation = p->options.generation;
    header.step = tensor->step;
    header.evaluation = tensor->evaluation;
    header.micro_batch = tensor->micro_batch;
    header.edge = tensor->edge;
    header.direction = tensor->direction;
    header.rows = (uint32_t)tensor->rows;
    header.columns = (uint32_t)tensor->columns;
    header.offset = offset;
    if (tensor->direction == TALLY__V1__DIRECTION__BACKWARD) {
        sums.loss_sum = tensor->sums.loss_sum;
        sums.weight = tensor->sums.weight;
        sums.correct = tensor->sums.correct;
        header.sums = &sums;
    }
    return rpc_stream_send_payload(out->stream, &header.base, data + offset, count * sizeof(float), on_release, parcel,
                                   err);
}

/* Gives back what was not given to the stream. */
static void drop_parts(struct peers_parcel *parcel, unsigned parts)
{
    atomic_fetch_sub(&parcel->parts, parts);
    atomic_fetch_sub(&parcel->p->pending, parts);
}

static tally_status send_parts(struct peers_outlet *out, struct peers_parcel *parcel, const struct peer_tensor *tensor,
                               const float *data, struct tally_error *err)
{
    size_t floats = tensor->rows * tensor->columns;
    unsigned parts = (unsigned)((floats + PART_FLOATS - 1) / PART_FLOATS);
    atomic_store(&parcel->parts, parts);
    atomic_fetch_add(&out->p->pending, parts);
    for (unsigned i = 0; i < parts; i++) {
        size_t offset = i * PART_FLOATS, count = floats - offset < PART_FLOATS ? floats - offset : PART_FLOATS;
        tally_status status = send_part(out, parcel, tensor, data, offset, count, err);
        if (status) {
            drop_parts(parcel, parts - i);
            return status;
        }
    }
    return TALLY_OK;
}

static const float *pack(struct peers_parcel *parcel, const struct peer_tensor *tensor, const float *data)
{
    for (size_t r = 0; r < tensor->rows; r++)
        memcpy(parcel->packed + r * tensor->columns, data + r * tensor->stride, tensor->columns * sizeof *data);
    return parcel->packed;
}

static tally_status peers_send(struct peers *peers, uint32_t rank, const struct peer_tensor *tensor, const float *data,
                               uint64_t *ret_ticket, struct tally_error *err)
{
    struct peers_rpc *p = peers_rpc_of(peers);
    struct peers_outlet *out = rank < p->ranks ? &p->outlets[rank] : NULL;
    size_t floats = tensor->rows * tensor->columns;
    bool packs = tensor->stride != tensor->columns && tensor->rows > 1;
    if (!out || !out->room || !floats || floats > (packs ? out->pack_floats : out->max_floats))
        return tally_fail(err, TALLY_EINTERNAL, "a tensor of %zu x %zu floats that the plan does not send to rank %u",
                          tensor->rows, tensor->columns, rank);
    atomic_store_explicit(&p->step, tensor->step, memory_order_relaxed);
    struct peers_looking room = {.p = p, .kind = WAIT_ROOM, .rank = rank, .tensor = *tensor};
    tally_status status = peers_rpc_wait(&room, err);
    if (status)
        return status;
    struct peers_parcel *parcel = peers_find_parcel(out);
    uint64_t ticket = ++p->tickets;
    atomic_fetch_sub(&out->credits, 1);
    atomic_store(&parcel->ticket, packs ? 0 : ticket);
    status = send_parts(out, parcel, tensor, packs ? pack(parcel, tensor, data) : data, err);
    if (status == TALLY_ECANCELLED) /* it has ended: whoever waits next is told why */
        status = TALLY_OK;
    if (status)
        return status;
    /* Nobody else polls: what is queued behind another message would lie there until the next wait. */
    if (p->options.on_data_thread && rpc_stream_queued_messages(out->stream) > 1)
        rpc_queue_poll(p->queue, 0);
    *ret_ticket = ticket;
    return TALLY_OK;
}

static tally_status peers_flush(struct peers *peers, uint64_t ticket, struct tally_error *err)
{
    struct peers_looking looking = {.p = peers_rpc_of(peers), .kind = WAIT_FLUSH, .ticket = ticket};
    return peers_rpc_wait(&looking, err);
}

/* ---- streams (data thread) ---- */

/* The stream between this worker and a rank has ended, and nobody asked for it. */
void peers_rpc_lost(struct peers_rpc *p, uint32_t rank, bool outgoing, const struct tally_error *end)
{
    if (atomic_load(&p->closing) || atomic_load(&p->done))
        return;
    struct tally_error err;
    char other[128], when[32] = "before its first step";
    uint64_t step = atomic_load(&p->step);
    if (step)
        snprintf(when, sizeof when, "at step %" PRIu64, step);
    tally_fail(&err, end->code ? end->code : TALLY_EUNAVAIL, "%s lost its stream %s %s %s: %s", p->who,
               outgoing ? "to" : "from", peers_rank_text(p, rank, other, sizeof other), when,
               end->code ? end->message : "the other side ended it");
    if (err.code == TALLY_ECANCELLED)
        err.code = TALLY_EUNAVAIL; /* the job was not ended here */
    wait_fail(&p->wait, &err, LOST_GRACE_MS);
}

static void on_ack(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct peers_outlet *out = user;
    const Tally__V1__TensorAck *ack = (const Tally__V1__TensorAck *)message->header;
    /* How much room there is, the receiver's plan says: an evaluation may need more of it than this side knows. */
    unsigned have = atomic_load(&out->credits);
    while (!atomic_compare_exchange_weak(&out->credits, &have,
                                         ack->credits > UINT32_MAX - have ? UINT32_MAX : have + ack->credits))
        ;
    wait_notify(&out->p->wait);
    rpc_stream_grant(stream, 1);
}

static void on_outlet_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    struct peers_outlet *out = user;
    struct peers_rpc *p = out->p;
    peers_rpc_lost(p, out->rank, true, end);
    wait_begin_change(&p->wait);
    out->ended = true;
    p->live_streams--;
    wait_end_change(&p->wait);
}

static tally_status say_hello(struct peers_outlet *out, struct tally_error *err)
{
    struct peers_rpc *p = out->p;
    Tally__V1__Version version = TALLY__V1__VERSION__INIT;
    Tally__V1__TensorMessage hello = TALLY__V1__TENSOR_MESSAGE__INIT;
    version.major = TALLY_PROTOCOL_MAJOR;
    version.minor = TALLY_PROTOCOL_MINOR;
    hello.job = p->options.job;
    hello.generation = p->options.generation;
    hello.from = p->names[p->options.plan->rank];
    hello.version = &version;
    tally_status status = rpc_stream_send(out->stream, &hello.base, err);
    return status == TALLY_ECANCELLED ? TALLY_OK : status; /* on_end tells why */
}

static tally_status open_outlet(struct peers_outlet *out, struct tally_error *err)
{
    struct peers_rpc *p = out->p;
    static const struct rpc_stream_events events = {.on_message = on_ack, .on_end = on_outlet_end};
    size_t parts = (out->max_floats + PART_FLOATS - 1) / PART_FLOATS;
    struct rpc_stream_options options = {.credits = ACK_CREDITS,
                                         .max_queued_messages = (unsigned)(out->room * parts + 8),
                                         .max_queued_bytes = SIZE_MAX / 2};
    tally_status status = rpc_stream_open(out->channel, p->queue, &tally__v1__peers__descriptor, "Exchange", &events,
                                          out, &options, &out->stream, err);
    if (status)
        return status;
    rpc_stream_ref(out->stream);
    wait_begin_change(&p->wait);
    p->live_streams++;
    wait_end_change(&p->wait);
    return say_hello(out, err);
}

static void connect_all(struct rpc_task *task)
{
    struct peers_rpc *p = (struct peers_rpc *)((char *)task - offsetof(struct peers_rpc, connect_task));
    struct tally_error err;
    tally_status status = TALLY_OK;
    peers_service_add(p->options.service, &p->listener);
    for (uint32_t r = 0; r < p->ranks && !status; r++)
        if (p->outlets[r].room)
            status = open_outlet(&p->outlets[r], &err);
    if (status)
        wait_fail(&p->wait, &err, 0);
    wait_begin_change(&p->wait);
    atomic_store(&p->connected, true);
    wait_end_change(&p->wait);
}

static bool is_connected(const void *context)
{
    return atomic_load(&((const struct peers_rpc *)context)->connected);
}

static void connect_text(const void *context, char *text, size_t size)
{
    (void)context;
    snprintf(text, size, "the data thread to open the streams to its peers");
}

tally_status peers_rpc_connect(struct peers_rpc *p, struct tally_error *err)
{
    struct wait_for what = {
        .is_met = is_connected, .text = connect_text, .context = p, .who = p->who, .limit_ms = p->options.wait_ms};
    p->connecting = true;
    p->connect_task.run = connect_all;
    rpc_queue_post(p->queue, &p->connect_task);
    return wait_until(&p->wait, &what, false, err);
}

/* ---- life ---- */

static size_t edge_floats(const struct plan *plan, const struct plan_edge *e)
{
    return (size_t)plan->rows_max * plan->tensors[e->tensor].elements;
}

/* The largest tensors from one stage to another; packed: those that have padding between rows. */
size_t peers_rpc_largest(const struct plan *plan, uint32_t from, uint32_t to, bool packed)
{
    size_t floats = 0;
    for (size_t i = 0; i < plan->edge_count; i++) {
        const struct plan_edge *e = &plan->edges[i];
        const struct plan_tensor *t = &plan->tensors[e->tensor];
        if (plan->segments[e->from].stage != from || plan->segments[e->to].stage != to ||
            (packed && t->stride == t->elements))
            continue;
        floats = edge_floats(plan, e) > floats ? edge_floats(plan, e) : floats;
    }
    return floats;
}

tally_status peers_rpc_no_memory(struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "no memory for the streams to a worker's peers");
}

static tally_status make_outlet(struct peers_rpc *p, uint32_t rank, struct tally_error *err)
{
    const struct plan *plan = p->options.plan;
    struct peers_outlet *out = &p->outlets[rank];
    uint32_t stage = peers_rpc_stage(p, rank), room = plan_peer_room(plan, plan->stage, stage);
    if (!room)
        return TALLY_OK;
    out->max_floats = peers_rpc_largest(plan, plan->stage, stage, false);
    out->pack_floats = peers_rpc_largest(plan, plan->stage, stage, true);
    out->parcels = calloc(room, sizeof *out->parcels);
    if (!out->parcels)
        return peers_rpc_no_memory(err);
    out->room = room;
    for (uint32_t i = 0; i < room; i++) {
        struct peers_parcel *parcel = &out->parcels[i];
        parcel->p = p;
        if (out->pack_floats && !(parcel->packed = calloc(out->pack_floats, sizeof *parcel->packed)))
            return peers_rpc_no_memory(err);
    }
    /* A peer's bytes go over a socket of their own. */
    struct rpc_channel_options options = {.own_connection = true};
    tally_status status = rpc_channel_new(p->options.addresses[rank], &options, &out->channel, err);
    if (status)
        tally_error_prefix(err, "worker %s", p->names[rank]);
    return status;
}

static tally_status make_all(struct peers_rpc *p, struct tally_error *err)
{
    const struct plan *plan = p->options.plan;
    p->outlets = calloc(p->ranks, sizeof *p->outlets);
    p->inlets = calloc(p->ranks, sizeof *p->inlets);
    p->names = calloc(p->ranks, sizeof *p->names);
    if (!p->outlets || !p->inlets || !p->names)
        return peers_rpc_no_memory(err);
    for (uint32_t r = 0; r < p->ranks; r++) {
        p->outlets[r].p = p->inlets[r].p = p;
        p->outlets[r].rank = p->inlets[r].rank = r;
        p->names[r] = strdup(p->options.names[r]);
        if (!p->names[r])
            return peers_rpc_no_memory(err);
    }
    peers_rank_text(p, plan->rank, p->who, sizeof p->who);
    tally_status status = TALLY_OK;
    for (uint32_t stage = 0; stage < plan->mesh.pipeline && !status; stage++) {
        uint32_t rank = plan_peer(plan, stage);
        if (rank == plan->rank)
            continue;
        status = make_outlet(p, rank, err);
        if (!status)
            status = peers_inlet_make(p, rank, err);
    }
    return status;
}

tally_status peers_rpc_open(const struct peers_rpc_options *options, struct peers_rpc **ret_peers,
                            struct tally_error *err)
{
    if (!options->plan->kernels->host_memory)
        return tally_fail(err, TALLY_EUNSUPPORTED, "backend %s keeps activations where RPC cannot read them",
                          options->plan->kernels->name);
    struct peers_rpc *p = calloc(1, sizeof *p);
    if (!p)
        return peers_rpc_no_memory(err);
    p->peers = (struct peers){peers_send, peers_inlet_receive, peers_flush};
    p->listener = (struct peers_listener){.job = options->job,
                                          .generation = options->generation,
                                          .on_open = peers_inlet_open,
                                          .on_message = peers_inlet_message,
                                          .on_end = peers_inlet_end};
    p->options = *options;
    p->options.wait_ms = options->wait_ms ? options->wait_ms : PEERS_WAIT_MS;
    p->queue = data_thread_queue(options->thread);
    p->ranks = options->plan->mesh.data * options->plan->mesh.pipeline * options->plan->mesh.tensor;
    p->looking.p = p;
    wait_init(&p->wait, p->queue);
    pthread_mutex_init(&p->activity_mutex, NULL);
    tally_status status = make_all(p, err);
    if (status) {
        peers_rpc_close(p);
        return status;
    }
    *ret_peers = p;
    return TALLY_OK;
}

struct peers *peers_rpc_peers(struct peers_rpc *p)
{
    return &p->peers;
}

void peers_rpc_interrupt(struct peers_rpc *p)
{
    wait_interrupt(&p->wait);
}

void peers_rpc_done(struct peers_rpc *p)
{
    atomic_store(&p->done, true);
}

static void disconnect_all(struct rpc_task *task)
{
    struct peers_rpc *p = (struct peers_rpc *)((char *)task - offsetof(struct peers_rpc, disconnect_task));
    peers_service_remove(p->options.service, &p->listener);
    wait_begin_change(&p->wait);
    atomic_store(&p->disconnected, true);
    wait_end_change(&p->wait);
}

static bool is_disconnected(const void *context)
{
    return atomic_load(&((const struct peers_rpc *)context)->disconnected);
}

static bool has_ended(const void *context)
{
    const struct peers_rpc *p = context;
    return p->live_streams == 0 && atomic_load(&p->pending) == 0;
}

/* Cancels what is open, and waits until no callback can come any more. The tasks run in order. */
static bool end_streams(struct peers_rpc *p)
{
    atomic_store(&p->closing, true);
    if (!p->connecting)
        return true;
    p->disconnect_task.run = disconnect_all;
    rpc_queue_post(p->queue, &p->disconnect_task);
    if (!wait_quietly(&p->wait, is_disconnected, p, CLOSE_WAIT_MS))
        return false;
    for (uint32_t r = 0; r < p->ranks; r++)
        if (p->outlets[r].stream)
            rpc_stream_cancel(p->outlets[r].stream);
    return wait_quietly(&p->wait, has_ended, p, CLOSE_WAIT_MS);
}

static void free_outlet(struct peers_outlet *out)
{
    for (uint32_t i = 0; out->parcels && i < out->room; i++)
        free(out->parcels[i].packed);
    free(out->parcels);
    rpc_stream_unref(out->stream);
    rpc_channel_free(out->channel);
}

void peers_rpc_close(struct peers_rpc *p)
{
    if (!p)
        return;
    /* Else a late callback would touch memory that has gone: better no worker than that. */
    bool ended = end_streams(p);
    tally_check(ended);
    for (uint32_t r = 0; r < p->ranks; r++) {
        if (p->outlets)
            free_outlet(&p->outlets[r]);
        if (p->inlets)
            peers_inlet_free(&p->inlets[r]);
        if (p->names)
            free(p->names[r]);
    }
    free(p->outlets);
    free(p->inlets);
    free(p->names);
    wait_destroy(&p->wait);
    pthread_mutex_destroy(&p->activity_mutex);
    free(p);
}
