#include "tests/worker/memory_peers.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/deadline.h"

/* A tensor on its way. */
struct letter {
    struct letter *next;
    uint32_t from, to;
    uint64_t ticket;
    struct peer_tensor tensor;
    const float *data; /* the sender's */
    float *copy;       /* ours, once it was taken out of the sender's memory */
};

struct endpoint {
    struct peers peers;
    struct memory_peers *net;
    uint32_t rank;
    uint64_t tickets;
};

struct memory_peers {
    struct memory_peers_options options;
    uint32_t ranks;
    struct endpoint *endpoints;
    uint32_t *room, *used; /* [from][to] */
    struct letter *letters;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint64_t sent, bytes;
    bool broken;
};

static struct endpoint *endpoint_of(struct peers *peers)
{
    return (struct endpoint *)peers; /* its first member */
}

static size_t floats_of(const struct peer_tensor *tensor)
{
    return (tensor->rows - 1) * tensor->stride + tensor->columns;
}

static tally_status broken(struct tally_error *err)
{
    return tally_fail(err, TALLY_EUNAVAIL, "a peer is gone");
}

/* Waits for room, under the mutex. */
static tally_status wait_room(struct memory_peers *net, const struct endpoint *e, uint32_t to, struct tally_error *err)
{
    size_t pair = (size_t)e->rank * net->ranks + to;
    struct timespec deadline = after_ms(net->options.wait_ms);
    assert(net->room[pair] > 0);
    while (net->used[pair] >= net->room[pair] + net->options.surplus && !net->broken)
        if (pthread_cond_timedwait(&net->changed, &net->mutex, &deadline) == ETIMEDOUT)
            return tally_fail(err, TALLY_ETIMEDOUT, "rank %u waited for room at rank %u", e->rank, to);
    if (net->broken)
        return broken(err);
    net->used[pair]++;
    return TALLY_OK;
}

static bool same_tensor(const struct peer_tensor *a, const struct peer_tensor *b)
{
    return a->step == b->step && a->evaluation == b->evaluation && a->micro_batch == b->micro_batch &&
           a->edge == b->edge && a->direction == b->direction;
}

static tally_status net_send(struct peers *peers, uint32_t rank, const struct peer_tensor *tensor, const float *data,
                             uint64_t *ret_ticket, struct tally_error *err)
{
    struct endpoint *e = endpoint_of(peers);
    struct memory_peers *net = e->net;
    struct letter *letter = calloc(1, sizeof *letter);
    if (!letter)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a letter");
    pthread_mutex_lock(&net->mutex);
    tally_status status = wait_room(net, e, rank, err);
    if (status) {
        free(letter);
    } else {
        for (const struct letter *l = net->letters; l; l = l->next)
            assert(l->from != e->rank || l->to != rank || !same_tensor(&l->tensor, tensor)); /* once */
        *letter = (struct letter){net->letters, e->rank, rank, ++e->tickets, *tensor, data, NULL};
        net->letters = letter;
        net->sent++;
        net->bytes += tensor->rows * tensor->columns * sizeof(float);
        *ret_ticket = letter->ticket;
        pthread_cond_broadcast(&net->changed);
    }
    pthread_mutex_unlock(&net->mutex);
    return status;
}

static struct letter **find(struct memory_peers *net, uint32_t from, uint32_t to, const struct peer_tensor *tensor)
{
    for (struct letter **at = &net->letters; *at; at = &(*at)->next)
        if ((*at)->from == from && (*at)->to == to && same_tensor(&(*at)->tensor, tensor))
            return at;
    return NULL;
}

static tally_status take(struct memory_peers *net, struct letter **at, struct peer_tensor *tensor, float *data,
                         struct tally_error *err)
{
    struct letter *letter = *at;
    if (letter->tensor.rows != tensor->rows || letter->tensor.columns != tensor->columns)
        return tally_fail(err, TALLY_EINVAL, "a tensor of %zu x %zu instead of %zu x %zu", letter->tensor.rows,
                          letter->tensor.columns, tensor->rows, tensor->columns);
    const float *from = letter->copy ? letter->copy : letter->data;
    for (size_t r = 0; r < tensor->rows; r++)
        memcpy(data + r * tensor->stride, from + r * letter->tensor.stride, tensor->columns * sizeof *data);
    tensor->sums = letter->tensor.sums;
    net->used[(size_t)letter->from * net->ranks + letter->to]--;
    *at = letter->next;
    free(letter->copy);
    free(letter);
    pthread_cond_broadcast(&net->changed);
    return TALLY_OK;
}

static tally_status net_receive(struct peers *peers, uint32_t rank, struct peer_tensor *tensor, float *data,
                                struct tally_error *err)
{
    struct endpoint *e = endpoint_of(peers);
    struct memory_peers *net = e->net;
    struct timespec deadline = after_ms(net->options.wait_ms);
    struct letter **at;
    tally_status status = TALLY_OK;
    pthread_mutex_lock(&net->mutex);
    while (!(at = find(net, rank, e->rank, tensor)) && !net->broken && !status)
        if (pthread_cond_timedwait(&net->changed, &net->mutex, &deadline) == ETIMEDOUT)
            status = tally_fail(err, TALLY_ETIMEDOUT,
                                "rank %u waited for edge %u of micro-batch %u of %s %" PRIu64 " from rank %u", e->rank,
                                tensor->edge, tensor->micro_batch, tensor->evaluation ? "evaluation" : "step",
                                tensor->step, rank);
    if (!status)
        status = at ? take(net, at, tensor, data, err) : broken(err);
    pthread_mutex_unlock(&net->mutex);
    return status;
}

static tally_status net_flush(struct peers *peers, uint64_t ticket, struct tally_error *err)
{
    struct endpoint *e = endpoint_of(peers);
    struct memory_peers *net = e->net;
    tally_status status = TALLY_OK;
    pthread_mutex_lock(&net->mutex);
    if (net->broken)
        status = broken(err);
    for (struct letter *l = net->letters; l && !status; l = l->next) {
        if (l->from != e->rank || l->ticket > ticket || l->copy)
            continue;
        l->copy = malloc(floats_of(&l->tensor) * sizeof *l->copy);
        if (l->copy)
            memcpy(l->copy, l->data, floats_of(&l->tensor) * sizeof *l->copy);
        else
            status = tally_fail(err, TALLY_ENOMEM, "no memory for a letter");
    }
    pthread_mutex_unlock(&net->mutex);
    return status;
}

tally_status memory_peers_open(struct plan *const *plans, uint32_t ranks, const struct memory_peers_options *options,
                               struct memory_peers **ret_peers, struct tally_error *err)
{
    struct memory_peers *net = calloc(1, sizeof *net);
    if (!net)
        return tally_fail(err, TALLY_ENOMEM, "no memory for peers");
    if (options)
        net->options = *options;
    if (!net->options.wait_ms)
        net->options.wait_ms = 20000;
    net->ranks = ranks;
    pthread_mutex_init(&net->mutex, NULL);
    pthread_cond_init(&net->changed, NULL);
    net->endpoints = calloc(ranks, sizeof *net->endpoints);
    net->room = calloc((size_t)ranks * ranks, sizeof *net->room);
    net->used = calloc((size_t)ranks * ranks, sizeof *net->used);
    if (!net->endpoints || !net->room || !net->used) {
        memory_peers_close(net);
        return tally_fail(err, TALLY_ENOMEM, "no memory for peers");
    }
    for (uint32_t r = 0; r < ranks; r++) {
        net->endpoints[r] = (struct endpoint){.peers = {net_send, net_receive, net_flush}, .net = net, .rank = r};
        for (uint32_t to = 0; to < ranks; to++)
            if (plans[r]->data_index == plans[to]->data_index)
                net->room[(size_t)r * ranks + to] = plan_peer_room(plans[to], plans[r]->stage, plans[to]->stage);
    }
    *ret_peers = net;
    return TALLY_OK;
}

void memory_peers_close(struct memory_peers *net)
{
    if (!net)
        return;
    while (net->letters) {
        struct letter *next = net->letters->next;
        free(net->letters->copy);
        free(net->letters);
        net->letters = next;
    }
    pthread_cond_destroy(&net->changed);
    pthread_mutex_destroy(&net->mutex);
    free(net->endpoints);
    free(net->room);
    free(net->used);
    free(net);
}

struct peers *memory_peers_of(struct memory_peers *net, uint32_t rank)
{
    return &net->endpoints[rank].peers;
}

uint64_t memory_peers_sent(const struct memory_peers *net, uint64_t *ret_bytes)
{
    if (ret_bytes)
        *ret_bytes = net->bytes;
    return net->sent;
}

void memory_peers_break(struct memory_peers *net)
{
    pthread_mutex_lock(&net->mutex);
    net->broken = true;
    pthread_cond_broadcast(&net->changed);
    pthread_mutex_unlock(&net->mutex);
}
