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

#include <assert.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/clock.h"
#include "common/limits.h"
#include "worker/wait.h"

#define PART_FLOATS (TALLY_SLICE_MAX_BYTES / sizeof(float)) /* of a tensor, in a message */
#define ACK_CREDITS 64      /* acknowledgements that may come at once; each is a few bytes */
#define LOST_GRACE_MS 1500  /* for the reason of a loss to come by itself */
#define CLOSE_WAIT_MS 10000 /* a cancelled stream ends as soon as the data thread polls */

/* A tensor that was given to the stream. */
struct parcel {
    struct peers_rpc *p;
    atomic_uint parts;            /* not released; 0: free */
    atomic_uint_least64_t ticket; /* of data that is the caller's; 0: it is `packed` */
    float *packed;                /* the outlet's pack_floats; NULL where nothing is ever packed */
};

struct outlet {
    struct peers_rpc *p;
    uint32_t rank;
    uint32_t room;      /* parcels; 0: nothing is sent there */
    size_t max_floats;  /* of a tensor */
    size_t pack_floats; /* of one that is not sent from where it lies */
    struct parcel *parcels;
    struct rpc_channel *channel;
    struct rpc_stream *stream;
    atomic_uint credits;
    bool ended; /* under the mutex */
};

enum letter_state { LETTER_EMPTY, LETTER_FILLS, LETTER_FULL };

struct letter {
    atomic_int state; /* EMPTY: the data thread's; FULL: the compute thread's */
    struct peer_tensor tensor;
    size_t floats; /* here */
    uint32_t parts;
    struct rpc_payload **payloads; /* the inlet's parts_max */
};

struct inlet {
    struct peers_rpc *p;
    uint32_t rank;
    uint32_t room; /* letters; 0: nothing comes from there */
    uint32_t parts_max;
    struct letter *letters;
    uint64_t *next;            /* by edge: the number of the first tensor that was not taken up yet (data thread) */
    struct letter *filling;    /* NULL: none (data thread) */
    struct rpc_stream *stream; /* set before the first letter is full */
    bool attached;
};

enum wait_kind { WAIT_NOTHING, WAIT_TENSOR, WAIT_ROOM, WAIT_FLUSH };

struct looking {
    struct peers_rpc *p;
    enum wait_kind kind;
    uint32_t rank;
    struct peer_tensor tensor;
    uint64_t ticket;
    int64_t since_ns;
};

struct peers_rpc {
    struct peers peers;
    struct peers_listener listener;
    struct peers_rpc_options options; /* names: ours */
    struct rpc_queue *queue;
    uint32_t ranks;
    char **names;
    char who[TALLY_NODE_NAME_MAX + 32]; /* this worker, as sentences begin */
    struct outlet *outlets;             /* by rank */
    struct inlet *inlets;
    uint64_t tickets;
    atomic_uint_least64_t step;

    struct wait_point wait;
    unsigned live_streams; /* outlets'; under the wait's mutex */
    atomic_uint pending;   /* parts given to streams and not released */
    bool connecting, disconnecting;
    atomic_bool connected, disconnected, done, closing;
    struct rpc_task connect_task, disconnect_task;

    pthread_mutex_t activity_mutex; /* for people */
    struct looking looking;
};

static struct peers_rpc *rpc_of(struct peers *peers)
{
    return (struct peers_rpc *)peers; /* its first member */
}

/* ---- words ---- */

static uint32_t stage_of(const struct peers_rpc *p, uint32_t rank)
{
    return rank / p->options.plan->mesh.tensor % p->options.plan->mesh.pipeline;
}

/* "activation 3 of step 41" */
static const char *tensor_text(const struct peer_tensor *t, char *text, size_t size)
{
    snprintf(text, size, "%s %" PRIu32 " of %s %" PRIu64,
             t->direction == TALLY__V1__DIRECTION__BACKWARD ? "gradient" : "activation", t->micro_batch,
             t->evaluation ? "the evaluation at version" : "step", t->step);
    return text;
}

/* "edge 2, the output of conv1" */
static const char *edge_text(const struct peers_rpc *p, uint32_t edge, char *text, size_t size)
{
    const struct plan *plan = p->options.plan;
    int32_t layer = plan->tensors[plan->edges[edge].tensor].layer;
    snprintf(text, size, "edge %" PRIu32 ", the output of %.100s", edge,
             layer >= 0 ? plan->model->layers[layer].name : "the input");
    return text;
}

static const char *rank_text(const struct peers_rpc *p, uint32_t rank, char *text, size_t size)
{
    snprintf(text, size, "%s (stage %" PRIu32 ")", p->names[rank], stage_of(p, rank));
    return text;
}

/* ---- waiting ---- */

static bool same_tensor(const struct peer_tensor *a, const struct peer_tensor *b)
{
    return a->step == b->step && a->evaluation == b->evaluation && a->micro_batch == b->micro_batch &&
           a->edge == b->edge && a->direction == b->direction;
}

static struct letter *find_letter(const struct inlet *in, const struct peer_tensor *tensor)
{
    for (uint32_t i = 0; i < in->room; i++)
        if (atomic_load(&in->letters[i].state) == LETTER_FULL && same_tensor(&in->letters[i].tensor, tensor))
            return &in->letters[i];
    return NULL;
}

static struct parcel *find_parcel(const struct outlet *out)
{
    for (uint32_t i = 0; i < out->room; i++)
        if (atomic_load(&out->parcels[i].parts) == 0)
            return &out->parcels[i];
    return NULL;
}

static bool has_left(const struct peers_rpc *p, uint64_t ticket)
{
    if (atomic_load(&p->pending) == 0)
        return true;
    for (uint32_t r = 0; r < p->ranks; r++)
        for (uint32_t i = 0; i < p->outlets[r].room; i++) {
            const struct parcel *parcel = &p->outlets[r].parcels[i];
            uint64_t its = atomic_load(&parcel->ticket);
            if (atomic_load(&parcel->parts) > 0 && (ticket == UINT64_MAX || (its > 0 && its <= ticket)))
                return false;
        }
    return true;
}

static bool is_met(const void *context)
{
    const struct looking *l = context;
    switch (l->kind) {
    case WAIT_TENSOR:
        return find_letter(&l->p->inlets[l->rank], &l->tensor) != NULL;
    case WAIT_ROOM:
        return atomic_load(&l->p->outlets[l->rank].credits) > 0 && find_parcel(&l->p->outlets[l->rank]);
    case WAIT_FLUSH:
        return has_left(l->p, l->ticket);
    case WAIT_NOTHING:
        break;
    }
    return true;
}

static void looking_text(const void *context, char *text, size_t size)
{
    const struct looking *l = context;
    char tensor[96] = "", edge[160] = "", rank[128] = "";
    if (l->kind == WAIT_TENSOR || l->kind == WAIT_ROOM) {
        tensor_text(&l->tensor, tensor, sizeof tensor);
        edge_text(l->p, l->tensor.edge, edge, sizeof edge);
        rank_text(l->p, l->rank, rank, sizeof rank);
    }
    switch (l->kind) {
    case WAIT_TENSOR:
        snprintf(text, size, "%s from %s (%s)", tensor, rank, edge);
        break;
    case WAIT_ROOM:
        snprintf(text, size, "room for %s at %s (%s)", tensor, rank, edge);
        break;
    default:
        snprintf(text, size, "the last activations and gradients to leave");
    }
}

static void set_looking(struct peers_rpc *p, const struct looking *looking)
{
    pthread_mutex_lock(&p->activity_mutex);
    p->looking = *looking;
    pthread_mutex_unlock(&p->activity_mutex);
}

/* A wait of the thread that computes. */
static tally_status compute_wait(const struct looking *looking, struct tally_error *err)
{
    struct peers_rpc *p = looking->p;
    if (is_met(looking))
        return TALLY_OK;
    struct looking told = *looking;
    told.since_ns = tally_now_ns();
    set_looking(p, &told);
    struct wait_for what = {.is_met = is_met,
                            .text = looking_text,
                            .context = looking,
                            .who = p->who,
                            .limit_ms = p->options.wait_ms,
                            .outside = looking->kind != WAIT_TENSOR};
    tally_status status = wait_until(&p->wait, &what, p->options.on_data_thread, err);
    set_looking(p, &(struct looking){.p = p});
    return status;
}

void peers_rpc_activity(struct peers_rpc *p, char *text, size_t size)
{
    char what[512];
    pthread_mutex_lock(&p->activity_mutex);
    struct looking looking = p->looking;
    pthread_mutex_unlock(&p->activity_mutex);
    if (size)
        text[0] = 0;
    if (looking.kind == WAIT_NOTHING)
        return;
    looking_text(&looking, what, sizeof what);
    int64_t waited_ms = (tally_now_ns() - looking.since_ns) / 1000000;
    if (waited_ms < 1000)
        snprintf(text, size, "waits for %s", what);
    else
        snprintf(text, size, "has waited %.1f s for %s", (double)waited_ms / 1000, what);
}

/* ---- sending ---- */

/* A part's bytes have left. Any thread. */
static void on_release(void *user)
{
    struct parcel *parcel = user;
    struct peers_rpc *p = parcel->p;
    wait_begin_change(&p->wait);
    atomic_fetch_sub(&parcel->parts, 1);
    atomic_fetch_sub(&p->pending, 1);
    wait_end_change(&p->wait); /* p may be freed from here on */
}

static tally_status send_part(struct outlet *out, struct parcel *parcel, const struct peer_tensor *tensor,
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
static void drop_parts(struct parcel *parcel, unsigned parts)
{
    atomic_fetch_sub(&parcel->parts, parts);
    atomic_fetch_sub(&parcel->p->pending, parts);
}

static tally_status send_parts(struct outlet *out, struct parcel *parcel, const struct peer_tensor *tensor,
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

static const float *pack(struct parcel *parcel, const struct peer_tensor *tensor, const float *data)
{
    for (size_t r = 0; r < tensor->rows; r++)
        memcpy(parcel->packed + r * tensor->columns, data + r * tensor->stride, tensor->columns * sizeof *data);
    return parcel->packed;
}

static tally_status peers_send(struct peers *peers, uint32_t rank, const struct peer_tensor *tensor, const float *data,
                               uint64_t *ret_ticket, struct tally_error *err)
{
    struct peers_rpc *p = rpc_of(peers);
    struct outlet *out = rank < p->ranks ? &p->outlets[rank] : NULL;
    size_t floats = tensor->rows * tensor->columns;
    bool packs = tensor->stride != tensor->columns && tensor->rows > 1;
    if (!out || !out->room || !floats || floats > (packs ? out->pack_floats : out->max_floats))
        return tally_fail(err, TALLY_EINTERNAL, "a tensor of %zu x %zu floats that the plan does not send to rank %u",
                          tensor->rows, tensor->columns, rank);
    atomic_store_explicit(&p->step, tensor->step, memory_order_relaxed);
    struct looking room = {.p = p, .kind = WAIT_ROOM, .rank = rank, .tensor = *tensor};
    tally_status status = compute_wait(&room, err);
    if (status)
        return status;
    struct parcel *parcel = find_parcel(out);
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
    struct looking looking = {.p = rpc_of(peers), .kind = WAIT_FLUSH, .ticket = ticket};
    return compute_wait(&looking, err);
}

/* ---- receiving (data thread) ---- */

/* The number of a tensor among those of its edge. Steps and leaves are far below 2^46 and 2^17. */
static uint64_t tensor_number(const struct peer_tensor *t)
{
    return ((t->step << 1 | t->evaluation) << 17) + t->micro_batch + 1;
}

static struct peer_tensor name_of(const Tally__V1__TensorMessage *m)
{
    struct peer_tensor t = {.step = m->step,
                            .evaluation = m->evaluation,
                            .micro_batch = m->micro_batch,
                            .edge = m->edge,
                            .direction = m->direction,
                            .rows = m->rows,
                            .columns = m->columns};
    if (m->sums)
        t.sums = (struct kernel_loss){m->sums->loss_sum, m->sums->weight, m->sums->correct};
    return t;
}

/* How many rows it must have, only who receives it knows (peers_receive). */
static tally_status check_shape(const struct inlet *in, const Tally__V1__TensorMessage *m, struct tally_error *err)
{
    const struct plan *plan = in->p->options.plan;
    size_t columns = plan->tensors[plan->edges[m->edge].tensor].elements;
    char text[96], edge[160];
    if (m->columns == columns && m->rows > 0 && m->rows <= plan->rows_max)
        return TALLY_OK;
    struct peer_tensor name = name_of(m);
    return tally_fail(err, TALLY_EINVAL,
                      "%s as %" PRIu32 " x %" PRIu32 " floats, expected at most %" PRIu32 " rows of %zu (%s)",
                      tensor_text(&name, text, sizeof text), m->rows, m->columns, plan->rows_max, columns,
                      edge_text(in->p, m->edge, edge, sizeof edge));
}

static tally_status check_name(const struct inlet *in, const Tally__V1__TensorMessage *m, struct tally_error *err)
{
    const struct peers_rpc *p = in->p;
    const struct plan *plan = p->options.plan;
    if (m->job != p->options.job || m->generation != p->options.generation)
        return tally_fail(err, TALLY_ESTATE,
                          "a tensor of job %" PRIu64 ", generation %" PRIu64 " instead of job %" PRIu64
                          ", generation %" PRIu64,
                          m->job, m->generation, p->options.job, p->options.generation);
    if (m->edge >= plan->edge_count)
        return tally_fail(err, TALLY_EINVAL, "a tensor of edge %" PRIu32 " of %zu", m->edge, plan->edge_count);
    const struct plan_edge *e = &plan->edges[m->edge];
    Tally__V1__Direction direction = e->backward ? TALLY__V1__DIRECTION__BACKWARD : TALLY__V1__DIRECTION__FORWARD;
    if (plan->segments[e->from].stage != stage_of(p, in->rank) || plan->segments[e->to].stage != plan->stage ||
        m->direction != direction)
        return tally_fail(err, TALLY_EINVAL,
                          "a tensor of edge %" PRIu32 ", direction %d, which does not go from stage %" PRIu32
                          " to stage %" PRIu32,
                          m->edge, (int)m->direction, stage_of(p, in->rank), plan->stage);
    if (m->step > plan->batches.steps || m->micro_batch > TALLY_MICRO_BATCHES_MAX)
        return tally_fail(err, TALLY_EINVAL, "a tensor of micro-batch %" PRIu32 " of step %" PRIu64, m->micro_batch,
                          m->step);
    return check_shape(in, m, err);
}

static tally_status begin_letter(struct inlet *in, const Tally__V1__TensorMessage *m, struct tally_error *err)
{
    struct letter *letter = NULL;
    for (uint32_t i = 0; i < in->room && !letter; i++)
        if (atomic_load(&in->letters[i].state) == LETTER_EMPTY)
            letter = &in->letters[i];
    if (!letter)
        return tally_fail(err, TALLY_ESTATE, "more than the %" PRIu32 " tensors that there was room for", in->room);
    letter->tensor = name_of(m);
    letter->floats = 0;
    letter->parts = 0;
    atomic_store(&letter->state, LETTER_FILLS);
    in->filling = letter;
    in->next[m->edge] = tensor_number(&letter->tensor) + 1;
    return TALLY_OK;
}

static tally_status fill_letter(struct inlet *in, const struct rpc_message *message, struct tally_error *err)
{
    const Tally__V1__TensorMessage *m = (const Tally__V1__TensorMessage *)message->header;
    struct letter *letter = in->filling;
    size_t bytes = rpc_payload_bytes(message->payload), floats = (size_t)m->rows * m->columns;
    struct peer_tensor name = name_of(m);
    char text[96];
    if (!same_tensor(&name, &letter->tensor) || m->rows != letter->tensor.rows ||
        m->columns != letter->tensor.columns || m->offset != letter->floats || bytes % sizeof(float) || bytes == 0 ||
        bytes / sizeof(float) > floats - letter->floats || letter->parts == in->parts_max)
        return tally_fail(err, TALLY_EINVAL,
                          "%s as %" PRIu32 " x %" PRIu32 " floats, of which %zu bytes at %" PRIu64
                          " do not follow %zu floats",
                          tensor_text(&name, text, sizeof text), m->rows, m->columns, bytes, m->offset, letter->floats);
    letter->payloads[letter->parts++] = rpc_payload_ref(message->payload);
    letter->floats += bytes / sizeof(float);
    if (letter->floats < floats)
        return TALLY_OK;
    in->filling = NULL;
    atomic_store(&letter->state, LETTER_FULL);
    wait_notify(&in->p->wait);
    return TALLY_OK;
}

static void send_credits(struct inlet *in, unsigned credits)
{
    Tally__V1__TensorAck ack = TALLY__V1__TENSOR_ACK__INIT;
    struct tally_error err;
    ack.credits = credits;
    tally_status status = rpc_stream_send(in->stream, &ack.base, &err);
    if (status && status != TALLY_ECANCELLED) /* that: on_end tells why */
        wait_fail(&in->p->wait, &err, 0);
}

static tally_status take_message(struct inlet *in, const struct rpc_message *message, struct tally_error *err)
{
    const Tally__V1__TensorMessage *m = (const Tally__V1__TensorMessage *)message->header;
    tally_status status = check_name(in, m, err);
    if (status)
        return status;
    struct peer_tensor name = name_of(m);
    if (!in->filling && tensor_number(&name) < in->next[m->edge]) { /* it was here already */
        rpc_stream_grant(in->stream, 1);
        if ((uint64_t)m->offset + rpc_payload_bytes(message->payload) / sizeof(float) >= (uint64_t)m->rows * m->columns)
            send_credits(in, 1);
        return TALLY_OK;
    }
    if (!in->filling)
        status = begin_letter(in, m, err);
    return status ? status : fill_letter(in, message, err);
}

static tally_status on_message(void *user, const struct rpc_message *message, struct tally_error *err)
{
    struct inlet *in = user;
    struct peers_rpc *p = in->p;
    struct tally_error why;
    tally_status status = take_message(in, message, &why);
    if (!status)
        return TALLY_OK;
    char rank[128];
    tally_fail(err, status, "%s sent %s %s", rank_text(p, in->rank, rank, sizeof rank), p->who, why.message);
    wait_fail(&p->wait, err, 0);
    return status;
}

/* ---- receiving (compute thread) ---- */

/* Copies bytes [at, at + bytes) of the packed tensor to out: whole rows lie `stride` apart there. */
static void copy_rows(const struct letter *letter, const struct peer_tensor *tensor, float *data)
{
    size_t row_bytes = tensor->columns * sizeof(float), stride_bytes = tensor->stride * sizeof(float), at = 0;
    for (uint32_t i = 0; i < letter->parts; i++) {
        const struct rpc_payload *payload = letter->payloads[i];
        size_t bytes = rpc_payload_bytes(payload), done = 0;
        if (tensor->stride == tensor->columns) {
            rpc_payload_copy(payload, 0, bytes, (char *)data + at);
            done = bytes;
        }
        while (done < bytes) {
            size_t row = (at + done) / row_bytes, in_row = (at + done) % row_bytes;
            size_t n = row_bytes - in_row < bytes - done ? row_bytes - in_row : bytes - done;
            rpc_payload_copy(payload, done, n, (char *)data + row * stride_bytes + in_row);
            done += n;
        }
        at += bytes;
    }
}

/* Lets the next one come. */
static void empty_letter(struct inlet *in, struct letter *letter)
{
    uint32_t parts = letter->parts;
    for (uint32_t i = 0; i < parts; i++)
        letter->payloads[i] = rpc_payload_unref(letter->payloads[i]);
    letter->parts = 0;
    atomic_store(&letter->state, LETTER_EMPTY);
    if (in->stream) {
        rpc_stream_grant(in->stream, parts);
        send_credits(in, 1);
    }
}

static tally_status peers_receive(struct peers *peers, uint32_t rank, struct peer_tensor *tensor, float *data,
                                  struct tally_error *err)
{
    struct peers_rpc *p = rpc_of(peers);
    if (rank >= p->ranks || !p->inlets[rank].room)
        return tally_fail(err, TALLY_EINTERNAL, "rank %u sends nothing here", rank);
    struct inlet *in = &p->inlets[rank];
    struct looking looking = {.p = p, .kind = WAIT_TENSOR, .rank = rank, .tensor = *tensor};
    atomic_store_explicit(&p->step, tensor->step, memory_order_relaxed);
    tally_status status = compute_wait(&looking, err);
    if (status)
        return status;
    struct letter *letter = find_letter(in, tensor);
    if (letter->tensor.rows != tensor->rows || letter->tensor.columns != tensor->columns) {
        char text[96], edge[160], sender[128];
        return tally_fail(err, TALLY_EINVAL, "%s sent %s (%s) as %zu x %zu floats, %s expects %zu x %zu",
                          rank_text(p, rank, sender, sizeof sender), tensor_text(tensor, text, sizeof text),
                          edge_text(p, tensor->edge, edge, sizeof edge), letter->tensor.rows, letter->tensor.columns,
                          p->who, tensor->rows, tensor->columns);
    }
    copy_rows(letter, tensor, data);
    tensor->sums = letter->tensor.sums;
    empty_letter(in, letter);
    /* Nobody else polls: the credit may be what the other waits for. */
    if (p->options.on_data_thread && rpc_stream_queued_messages(in->stream) > 1)
        rpc_queue_poll(p->queue, 0);
    return TALLY_OK;
}

/* ---- streams (data thread) ---- */

/* The stream between this worker and a rank has ended, and nobody asked for it. */
static void on_lost(struct peers_rpc *p, uint32_t rank, bool outgoing, const struct tally_error *end)
{
    if (atomic_load(&p->closing) || atomic_load(&p->done))
        return;
    struct tally_error err;
    char other[128], when[32] = "before its first step";
    uint64_t step = atomic_load(&p->step);
    if (step)
        snprintf(when, sizeof when, "at step %" PRIu64, step);
    tally_fail(&err, end->code ? end->code : TALLY_EUNAVAIL, "%s lost its stream %s %s %s: %s", p->who,
               outgoing ? "to" : "from", rank_text(p, rank, other, sizeof other), when,
               end->code ? end->message : "the other side ended it");
    if (err.code == TALLY_ECANCELLED)
        err.code = TALLY_EUNAVAIL; /* the job was not ended here */
    wait_fail(&p->wait, &err, LOST_GRACE_MS);
}

static tally_status on_inlet_open(struct peers_listener *listener, struct rpc_stream *stream, const char *from,
                                  void **ret_inlet, struct tally_error *err)
{
    struct peers_rpc *p = (struct peers_rpc *)((char *)listener - offsetof(struct peers_rpc, listener));
    uint32_t rank = 0;
    while (rank < p->ranks && strcmp(p->names[rank], from) != 0)
        rank++;
    if (rank == p->ranks || !p->inlets[rank].room)
        return tally_fail(err, TALLY_EINVAL, "worker %s has nothing to send to %s", from, p->who);
    struct inlet *in = &p->inlets[rank];
    if (in->attached)
        return tally_fail(err, TALLY_EEXIST, "worker %s has a stream to %s already", from, p->who);
    in->attached = true;
    in->stream = rpc_stream_ref(stream);
    rpc_stream_grant(stream, in->room * in->parts_max);
    send_credits(in, in->room);
    *ret_inlet = in;
    return TALLY_OK;
}

static void on_inlet_end(void *user, const struct tally_error *end)
{
    struct inlet *in = user;
    on_lost(in->p, in->rank, false, end);
}

static void on_ack(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct outlet *out = user;
    const Tally__V1__TensorAck *ack = (const Tally__V1__TensorAck *)message->header;
    /* More than the room is never of use, nor needed for a sum that fits. */
    if (ack->credits <= out->room && atomic_load(&out->credits) <= out->room)
        atomic_fetch_add(&out->credits, ack->credits);
    wait_notify(&out->p->wait);
    rpc_stream_grant(stream, 1);
}

static void on_outlet_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    struct outlet *out = user;
    struct peers_rpc *p = out->p;
    on_lost(p, out->rank, true, end);
    wait_begin_change(&p->wait);
    out->ended = true;
    p->live_streams--;
    wait_end_change(&p->wait);
}

static tally_status say_hello(struct outlet *out, struct tally_error *err)
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

static tally_status open_outlet(struct outlet *out, struct tally_error *err)
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
static size_t largest(const struct plan *plan, uint32_t from, uint32_t to, bool packed)
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

static tally_status no_memory(struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "no memory for the streams to a worker's peers");
}

static tally_status make_outlet(struct peers_rpc *p, uint32_t rank, struct tally_error *err)
{
    const struct plan *plan = p->options.plan;
    struct outlet *out = &p->outlets[rank];
    uint32_t stage = stage_of(p, rank), room = plan_peer_room(plan, plan->stage, stage);
    if (!room)
        return TALLY_OK;
    out->max_floats = largest(plan, plan->stage, stage, false);
    out->pack_floats = largest(plan, plan->stage, stage, true);
    out->parcels = calloc(room, sizeof *out->parcels);
    if (!out->parcels)
        return no_memory(err);
    out->room = room;
    for (uint32_t i = 0; i < room; i++) {
        struct parcel *parcel = &out->parcels[i];
        parcel->p = p;
        if (out->pack_floats && !(parcel->packed = calloc(out->pack_floats, sizeof *parcel->packed)))
            return no_memory(err);
    }
    /* A peer's bytes go over a socket of their own. */
    struct rpc_channel_options options = {.own_connection = true};
    tally_status status = rpc_channel_new(p->options.addresses[rank], &options, &out->channel, err);
    if (status)
        tally_error_prefix(err, "worker %s", p->names[rank]);
    return status;
}

static tally_status make_inlet(struct peers_rpc *p, uint32_t rank, struct tally_error *err)
{
    const struct plan *plan = p->options.plan;
    struct inlet *in = &p->inlets[rank];
    uint32_t stage = stage_of(p, rank), room = plan_peer_room(plan, stage, plan->stage);
    if (!room)
        return TALLY_OK;
    in->parts_max = (uint32_t)((largest(plan, stage, plan->stage, false) + PART_FLOATS - 1) / PART_FLOATS);
    in->letters = calloc(room, sizeof *in->letters);
    in->next = calloc(plan->edge_count, sizeof *in->next);
    if (!in->letters || !in->next)
        return no_memory(err);
    in->room = room;
    for (uint32_t i = 0; i < room; i++)
        if (!(in->letters[i].payloads = calloc(in->parts_max, sizeof *in->letters[i].payloads)))
            return no_memory(err);
    return TALLY_OK;
}

static tally_status make_all(struct peers_rpc *p, struct tally_error *err)
{
    const struct plan *plan = p->options.plan;
    p->outlets = calloc(p->ranks, sizeof *p->outlets);
    p->inlets = calloc(p->ranks, sizeof *p->inlets);
    p->names = calloc(p->ranks, sizeof *p->names);
    if (!p->outlets || !p->inlets || !p->names)
        return no_memory(err);
    for (uint32_t r = 0; r < p->ranks; r++) {
        p->outlets[r].p = p->inlets[r].p = p;
        p->outlets[r].rank = p->inlets[r].rank = r;
        p->names[r] = strdup(p->options.names[r]);
        if (!p->names[r])
            return no_memory(err);
    }
    rank_text(p, plan->rank, p->who, sizeof p->who);
    tally_status status = TALLY_OK;
    for (uint32_t stage = 0; stage < plan->mesh.pipeline && !status; stage++) {
        uint32_t rank = plan_peer(plan, stage);
        if (rank == plan->rank)
            continue;
        status = make_outlet(p, rank, err);
        if (!status)
            status = make_inlet(p, rank, err);
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
        return no_memory(err);
    p->peers = (struct peers){peers_send, peers_receive, peers_flush};
    p->listener = (struct peers_listener){.job = options->job,
                                          .generation = options->generation,
                                          .on_open = on_inlet_open,
                                          .on_message = on_message,
                                          .on_end = on_inlet_end};
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

static void free_outlet(struct outlet *out)
{
    for (uint32_t i = 0; out->parcels && i < out->room; i++)
        free(out->parcels[i].packed);
    free(out->parcels);
    rpc_stream_unref(out->stream);
    rpc_channel_free(out->channel);
}

static void free_inlet(struct inlet *in)
{
    for (uint32_t i = 0; in->letters && i < in->room; i++) {
        struct letter *letter = &in->letters[i];
        for (uint32_t j = 0; letter->payloads && j < letter->parts; j++)
            rpc_payload_unref(letter->payloads[j]);
        free(letter->payloads);
    }
    free(in->letters);
    free(in->next);
    rpc_stream_unref(in->stream);
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
            free_inlet(&p->inlets[r]);
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
