/* Receiving: letters are filled by the data thread and emptied by the compute thread. */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker/peers_rpc_build.h"

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
static tally_status check_shape(const struct peers_inlet *in, const Tally__V1__TensorMessage *m,
                                struct tally_error *err)
{
    const struct plan *plan = in->p->options.plan;
    size_t columns = plan->tensors[plan->edges[m->edge].tensor].elements;
    char text[96], edge[160];
    if (m->columns == columns && m->rows > 0 && m->rows <= plan->rows_max)
        return TALLY_OK;
    struct peer_tensor name = name_of(m);
    return tally_fail(err, TALLY_EINVAL,
                      "%s as %" PRIu32 " x %" PRIu32 " floats, expected at most %" PRIu32 " rows of %zu (%s)",
                      peers_tensor_text(&name, text, sizeof text), m->rows, m->columns, plan->rows_max, columns,
                      peers_edge_text(in->p, m->edge, edge, sizeof edge));
}

static tally_status check_name(const struct peers_inlet *in, const Tally__V1__TensorMessage *m, struct tally_error *err)
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
    if (plan->segments[e->from].stage != peers_rpc_stage(p, in->rank) || plan->segments[e->to].stage != plan->stage ||
        m->direction != direction)
        return tally_fail(err, TALLY_EINVAL,
                          "a tensor of edge %" PRIu32 ", direction %d, which does not go from stage %" PRIu32
                          " to stage %" PRIu32,
                          m->edge, (int)m->direction, peers_rpc_stage(p, in->rank), plan->stage);
    if (m->step > plan->batches.steps || m->micro_batch > TALLY_MICRO_BATCHES_MAX)
        return tally_fail(err, TALLY_EINVAL, "a tensor of micro-batch %" PRIu32 " of step %" PRIu64, m->micro_batch,
                          m->step);
    return check_shape(in, m, err);
}

static tally_status begin_letter(struct peers_inlet *in, const Tally__V1__TensorMessage *m, struct tally_error *err)
{
    struct peers_letter *letter = NULL;
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

static tally_status fill_letter(struct peers_inlet *in, const struct rpc_message *message, struct tally_error *err)
{
    const Tally__V1__TensorMessage *m = (const Tally__V1__TensorMessage *)message->header;
    struct peers_letter *letter = in->filling;
    size_t bytes = rpc_payload_bytes(message->payload), floats = (size_t)m->rows * m->columns;
    struct peer_tensor name = name_of(m);
    char text[96];
    if (!peers_same_tensor(&name, &letter->tensor) || m->rows != letter->tensor.rows ||
        m->columns != letter->tensor.columns || m->offset != letter->floats || bytes % sizeof(float) || bytes == 0 ||
        bytes / sizeof(float) > floats - letter->floats || letter->parts == in->parts_max)
        return tally_fail(
            err, TALLY_EINVAL,
            "%s as %" PRIu32 " x %" PRIu32 " floats, of which %zu bytes at %" PRIu64 " do not follow %zu floats",
            peers_tensor_text(&name, text, sizeof text), m->rows, m->columns, bytes, m->offset, letter->floats);
    letter->payloads[letter->parts++] = rpc_payload_ref(message->payload);
    letter->floats += bytes / sizeof(float);
    if (letter->floats < floats)
        return TALLY_OK;
    in->filling = NULL;
    atomic_store(&letter->state, LETTER_FULL);
    wait_notify(&in->p->wait);
    return TALLY_OK;
}

static void send_credits(struct peers_inlet *in, unsigned credits)
{
    Tally__V1__TensorAck ack = TALLY__V1__TENSOR_ACK__INIT;
    struct tally_error err;
    ack.credits = credits;
    tally_status status = rpc_stream_send(in->stream, &ack.base, &err);
    if (status && status != TALLY_ECANCELLED) /* that: on_end tells why */
        wait_fail(&in->p->wait, &err, 0);
}

static tally_status take_message(struct peers_inlet *in, const struct rpc_message *message, struct tally_error *err)
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

tally_status peers_inlet_message(void *user, const struct rpc_message *message, struct tally_error *err)
{
    struct peers_inlet *in = user;
    struct peers_rpc *p = in->p;
    struct tally_error why;
    tally_status status = take_message(in, message, &why);
    if (!status)
        return TALLY_OK;
    char rank[128];
    tally_fail(err, status, "%s sent %s %s", peers_rank_text(p, in->rank, rank, sizeof rank), p->who, why.message);
    wait_fail(&p->wait, err, 0);
    return status;
}

/* ---- receiving (compute thread) ---- */

/* Copies bytes [at, at + bytes) of the packed tensor to out: whole rows lie `stride` apart there. */
static void copy_rows(const struct peers_letter *letter, const struct peer_tensor *tensor, float *data)
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
static void empty_letter(struct peers_inlet *in, struct peers_letter *letter)
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

tally_status peers_inlet_receive(struct peers *peers, uint32_t rank, struct peer_tensor *tensor, float *data,
                                 struct tally_error *err)
{
    struct peers_rpc *p = peers_rpc_of(peers);
    if (rank >= p->ranks || !p->inlets[rank].room)
        return tally_fail(err, TALLY_EINTERNAL, "rank %u sends nothing here", rank);
    struct peers_inlet *in = &p->inlets[rank];
    struct peers_looking looking = {.p = p, .kind = WAIT_TENSOR, .rank = rank, .tensor = *tensor};
    atomic_store_explicit(&p->step, tensor->step, memory_order_relaxed);
    tally_status status = peers_rpc_wait(&looking, err);
    if (status)
        return status;
    struct peers_letter *letter = peers_find_letter(in, tensor);
    if (letter->tensor.rows != tensor->rows || letter->tensor.columns != tensor->columns) {
        char text[96], edge[160], sender[128];
        return tally_fail(err, TALLY_EINVAL, "%s sent %s (%s) as %zu x %zu floats, %s expects %zu x %zu",
                          peers_rank_text(p, rank, sender, sizeof sender), peers_tensor_text(tensor, text, sizeof text),
                          peers_edge_text(p, tensor->edge, edge, sizeof edge), letter->tensor.rows,
                          letter->tensor.columns, p->who, tensor->rows, tensor->columns);
    }
    copy_rows(letter, tensor, data);
    tensor->sums = letter->tensor.sums;
    empty_letter(in, letter);
    /* Nobody else polls: the credit may be what the other waits for. */
    if (p->options.on_data_thread && rpc_stream_queued_messages(in->stream) > 1)
        rpc_queue_poll(p->queue, 0);
    return TALLY_OK;
}

tally_status peers_inlet_open(struct peers_listener *listener, struct rpc_stream *stream, const char *from,
                              void **ret_inlet, struct tally_error *err)
{
    struct peers_rpc *p = (struct peers_rpc *)((char *)listener - offsetof(struct peers_rpc, listener));
    uint32_t rank = 0;
    while (rank < p->ranks && strcmp(p->names[rank], from) != 0)
        rank++;
    if (rank == p->ranks || !p->inlets[rank].room)
        return tally_fail(err, TALLY_EINVAL, "worker %s has nothing to send to %s", from, p->who);
    struct peers_inlet *in = &p->inlets[rank];
    if (in->attached)
        return tally_fail(err, TALLY_EEXIST, "worker %s has a stream to %s already", from, p->who);
    in->attached = true;
    in->stream = rpc_stream_ref(stream);
    rpc_stream_grant(stream, in->room * in->parts_max);
    send_credits(in, in->room);
    *ret_inlet = in;
    return TALLY_OK;
}

void peers_inlet_end(void *user, const struct tally_error *end)
{
    struct peers_inlet *in = user;
    peers_rpc_lost(in->p, in->rank, false, end);
}

/* ---- life ---- */

tally_status peers_inlet_make(struct peers_rpc *p, uint32_t rank, struct tally_error *err)
{
    const struct plan *plan = p->options.plan;
    struct peers_inlet *in = &p->inlets[rank];
    uint32_t stage = peers_rpc_stage(p, rank), room = plan_peer_room(plan, stage, plan->stage);
    if (!room)
        return TALLY_OK;
    in->parts_max = (uint32_t)((peers_rpc_largest(plan, stage, plan->stage, false) + PART_FLOATS - 1) / PART_FLOATS);
    in->letters = calloc(room, sizeof *in->letters);
    in->next = calloc(plan->edge_count, sizeof *in->next);
    if (!in->letters || !in->next)
        return peers_rpc_no_memory(err);
    in->room = room;
    for (uint32_t i = 0; i < room; i++)
        if (!(in->letters[i].payloads = calloc(in->parts_max, sizeof *in->letters[i].payloads)))
            return peers_rpc_no_memory(err);
    return TALLY_OK;
}

void peers_inlet_free(struct peers_inlet *in)
{
    for (uint32_t i = 0; in->letters && i < in->room; i++) {
        struct peers_letter *letter = &in->letters[i];
        for (uint32_t j = 0; letter->payloads && j < letter->parts; j++)
            rpc_payload_unref(letter->payloads[j]);
        free(letter->payloads);
    }
    free(in->letters);
    free(in->next);
    rpc_stream_unref(in->stream);
}
