#include "tests/worker/memory_hub.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "model/init.h"
#include "tests/support/deadline.h"

struct held {
    uint32_t end; /* 0: nothing */
    struct kernel_loss sums;
};

struct client {
    struct transport transport;
    struct memory_hub *hub;
    float *weights;              /* the executor's */
    const size_t *slice_offsets; /* NULL: as in the model */
    float *gradient;             /* flat */
    float **destination;         /* by slice */
};

struct memory_hub {
    const struct plan *plan;
    const struct model *model;
    struct memory_hub_options options;
    struct kernel_stream *stream;
    struct kernel_sgd sgd;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint32_t leaves; /* of a full step */
    float *weights, *momentum, *gradient;
    uint64_t *version;          /* by slice */
    struct held *held;          /* [slice][leaf where it begins] */
    float **sum;                /* [leaf where it begins]: a flat vector */
    struct kernel_loss *losses; /* by step */
    uint64_t pushes;
    struct client *clients;
};

static struct client *client_of(struct transport *transport)
{
    return (struct client *)transport; /* its first member */
}

static tally_status hub_wait(struct transport *transport, uint32_t begin, uint32_t end, uint64_t version,
                             struct tally_error *err)
{
    struct memory_hub *hub = client_of(transport)->hub;
    struct timespec deadline = {0};
    tally_status status = TALLY_OK;
    pthread_mutex_lock(&hub->mutex);
    for (uint32_t s = begin; s < end && !status; s++) {
        while (hub->version[s] < version && !status) {
            if (!deadline.tv_sec && hub->options.wait_ms > 0)
                deadline = after_ms(hub->options.wait_ms);
            if (hub->options.wait_ms < 0 || pthread_cond_timedwait(&hub->changed, &hub->mutex, &deadline) == ETIMEDOUT)
                status = tally_fail(err, TALLY_ETIMEDOUT, "waited for slice %u of version %llu", s,
                                    (unsigned long long)version);
        }
        if (!status && hub->version[s] != version)
            status = tally_fail(err, TALLY_EINTERNAL, "slice %u is at version %llu already, not %llu", s,
                                (unsigned long long)hub->version[s], (unsigned long long)version);
    }
    pthread_mutex_unlock(&hub->mutex);
    return status;
}

/* NaN wherever a parameter lies, 0 between. */
static void poison(const struct model *model, uint32_t slice, float *gradient)
{
    const struct slice *s = &model->slices[slice];
    memset(gradient, 0, s->count * sizeof *gradient);
    for (uint32_t p = s->param_begin; p < s->param_end; p++) {
        size_t begin = model->params[p].offset, end = begin + model->params[p].shape.elements;
        begin = begin < s->offset ? s->offset : begin;
        end = end > s->offset + s->count ? s->offset + s->count : end;
        for (size_t i = begin; i < end; i++)
            gradient[i - s->offset] = NAN;
    }
}

static tally_status hub_destination(struct transport *transport, uint32_t slice, float **ret_gradient,
                                    struct tally_error *err)
{
    (void)err;
    struct client *c = client_of(transport);
    *ret_gradient = c->destination[slice];
    if (c->hub->options.poison)
        poison(c->hub->model, slice, *ret_gradient);
    return TALLY_OK;
}

static void add_sums(struct kernel_loss *left, const struct kernel_loss *right)
{
    left->loss_sum += right->loss_sum;
    left->weight += right->weight;
    left->correct += right->correct;
}

static void give(const struct memory_hub *hub, const struct client *c, uint32_t slice)
{
    const struct slice *s = &hub->model->slices[slice];
    size_t offset = c->slice_offsets ? c->slice_offsets[slice] : s->offset;
    if (c->weights && offset != SIZE_MAX)
        memcpy(c->weights + offset, hub->weights + s->offset, s->count * sizeof(float));
}

static void apply(struct memory_hub *hub, uint32_t slice, uint64_t step, const struct kernel_loss *sums)
{
    const struct slice *s = &hub->model->slices[slice];
    struct kernel_sgd sgd = hub->sgd;
    sgd.first = step == 1;
    memcpy(hub->gradient + s->offset, hub->sum[0] + s->offset, s->count * sizeof(float));
    float *momentum = hub->momentum ? hub->momentum + s->offset : NULL;
    hub->plan->kernels->sgd(hub->stream, s->count, &sgd, (float)sums->weight, hub->sum[0] + s->offset, NULL,
                            hub->weights + s->offset, momentum, hub->weights + s->offset, momentum);
    for (uint32_t i = 0; i < hub->options.clients; i++)
        give(hub, &hub->clients[i], slice);
    if (slice == 0)
        hub->losses[step] = *sums;
    else if (hub->version[0] >= step) /* every slice must have been told the same */
        assert(memcmp(&hub->losses[step], sums, sizeof *sums) == 0);
}

/* Takes a node in and merges it with what it meets. */
static void take(struct memory_hub *hub, const struct transport_push *push, uint32_t leaves)
{
    const struct slice *s = &hub->model->slices[push->slice];
    struct held *held = hub->held + (size_t)push->slice * hub->leaves;
    struct tree_node node = push->node;
    for (uint32_t i = node.begin; i < node.end; i++)
        assert(!held[i].end); /* each leaf once */
    memcpy(hub->sum[node.begin] + s->offset, push->gradient, s->count * sizeof(float));
    held[node.begin] = (struct held){node.end, push->sums};
    while (node.end - node.begin < leaves) {
        struct tree_node sibling = tree_sibling(leaves, node), parent = tree_parent(leaves, node);
        if (held[sibling.begin].end != sibling.end)
            return;
        uint32_t left = parent.begin, right = node.begin == left ? sibling.begin : node.begin;
        float *sum = hub->sum[left] + s->offset;
        hub->plan->kernels->sum(hub->stream, s->count, sum, sum, hub->sum[right] + s->offset);
        add_sums(&held[left].sums, &held[right].sums);
        held[left].end = parent.end;
        held[right].end = 0;
        node = parent;
    }
    apply(hub, push->slice, push->step, &held[0].sums);
    held[0].end = 0;
    hub->version[push->slice] = push->step;
    pthread_cond_broadcast(&hub->changed);
}

static tally_status hub_push(struct transport *transport, const struct transport_push *push, struct tally_error *err)
{
    struct client *c = client_of(transport);
    struct memory_hub *hub = c->hub;
    uint32_t leaves = batches_step(&hub->plan->batches, push->step).leaves;
    assert(push->slice < hub->model->slice_count && tree_is_node(leaves, push->node));
    assert(push->gradient == c->destination[push->slice]);
    tally_status status = TALLY_OK;
    pthread_mutex_lock(&hub->mutex);
    hub->pushes++;
    if (hub->options.discard) {
        hub->version[push->slice] = push->step;
        if (push->slice == 0)
            hub->losses[push->step] = push->sums;
    } else if (push->step != hub->version[push->slice] + 1)
        status = tally_fail(err, TALLY_EINTERNAL, "a push of step %llu while slice %u is at version %llu",
                            (unsigned long long)push->step, push->slice, (unsigned long long)hub->version[push->slice]);
    else
        take(hub, push, leaves);
    pthread_mutex_unlock(&hub->mutex);
    if (hub->options.poison)
        poison(hub->model, push->slice, c->destination[push->slice]); /* it is not the executor's any more (T3) */
    return status;
}

static tally_status hub_flush(struct transport *transport, struct tally_error *err)
{
    (void)transport;
    (void)err;
    return TALLY_OK;
}

static void take_sgd(struct memory_hub *hub)
{
    const Tally__V1__Sgd *sgd = hub->model->spec->train->optimizer->sgd;
    hub->sgd = (struct kernel_sgd){.lr = (float)sgd->lr,
                                   .momentum = (float)sgd->momentum,
                                   .dampening = sgd->dampening,
                                   .weight_decay = (float)sgd->weight_decay,
                                   .nesterov = sgd->nesterov,
                                   .maximize = sgd->maximize};
}

static float *zeroed(size_t floats)
{
    float *p = aligned_alloc(64, (floats * sizeof *p + 63) / 64 * 64 + 64);
    if (p)
        memset(p, 0, floats * sizeof *p);
    return p;
}

static bool client_alloc(struct memory_hub *hub, struct client *c)
{
    size_t slices = hub->model->slice_count;
    c->destination = calloc(slices + 1, sizeof *c->destination);
    c->gradient = hub->options.scatter ? NULL : zeroed(hub->model->flat_count);
    if (!c->destination || (!hub->options.scatter && !c->gradient))
        return false;
    for (size_t s = 0; s < slices; s++) {
        c->destination[s] =
            hub->options.scatter ? zeroed(hub->model->slices[s].count) : c->gradient + hub->model->slices[s].offset;
        if (!c->destination[s])
            return false;
    }
    return true;
}

static bool hub_alloc(struct memory_hub *hub)
{
    size_t flat = hub->model->flat_count, slices = hub->model->slice_count;
    hub->weights = zeroed(flat);
    hub->momentum = hub->sgd.momentum != 0 ? zeroed(flat) : NULL;
    hub->gradient = zeroed(flat);
    hub->version = calloc(slices + 1, sizeof *hub->version);
    hub->held = calloc((slices + 1) * hub->leaves, sizeof *hub->held);
    hub->sum = calloc(hub->leaves, sizeof *hub->sum);
    hub->losses = calloc(hub->plan->batches.steps + 1, sizeof *hub->losses);
    hub->clients = calloc(hub->options.clients, sizeof *hub->clients);
    bool ok = hub->weights && (hub->momentum || hub->sgd.momentum == 0) && hub->gradient && hub->version && hub->held &&
              hub->sum && hub->losses && hub->clients;
    for (uint32_t i = 0; i < hub->leaves && ok && !hub->options.discard; i++)
        ok = (hub->sum[i] = zeroed(flat)) != NULL;
    for (uint32_t i = 0; i < hub->options.clients && ok; i++)
        ok = client_alloc(hub, &hub->clients[i]);
    return ok;
}

tally_status memory_hub_open(const struct plan *plan, const struct memory_hub_options *options,
                             struct memory_hub **ret_hub, struct tally_error *err)
{
    struct memory_hub *hub = calloc(1, sizeof *hub);
    if (!hub)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a hub");
    hub->plan = plan;
    hub->model = plan->model;
    hub->options = *options;
    if (!hub->options.wait_ms)
        hub->options.wait_ms = 20000;
    hub->leaves = (plan->batches.batch + plan->batches.micro - 1) / plan->batches.micro;
    pthread_mutex_init(&hub->mutex, NULL);
    pthread_cond_init(&hub->changed, NULL);
    take_sgd(hub);
    tally_status status = hub_alloc(hub) ? TALLY_OK : tally_fail(err, TALLY_ENOMEM, "no memory for a hub");
    if (!status)
        status = plan->kernels->stream_open(plan->backend, &hub->stream, err);
    if (!status)
        status = init_weights(hub->model, 0, hub->model->flat_count, hub->weights, err);
    if (status) {
        memory_hub_close(hub);
        return status;
    }
    *ret_hub = hub;
    return TALLY_OK;
}

void memory_hub_close(struct memory_hub *hub)
{
    if (!hub)
        return;
    for (uint32_t i = 0; hub->clients && i < hub->options.clients; i++) {
        struct client *c = &hub->clients[i];
        for (size_t s = 0; hub->options.scatter && c->destination && s < hub->model->slice_count; s++)
            free(c->destination[s]);
        free(c->destination);
        free(c->gradient);
    }
    for (uint32_t i = 0; hub->sum && i < hub->leaves; i++)
        free(hub->sum[i]);
    if (hub->stream)
        hub->plan->kernels->stream_close(hub->stream);
    pthread_cond_destroy(&hub->changed);
    pthread_mutex_destroy(&hub->mutex);
    free(hub->weights);
    free(hub->momentum);
    free(hub->gradient);
    free(hub->version);
    free(hub->held);
    free(hub->sum);
    free(hub->losses);
    free(hub->clients);
    free(hub);
}

struct transport *memory_hub_join_stage(struct memory_hub *hub, uint32_t client, float *weights,
                                        const size_t *slice_offsets)
{
    struct client *c = &hub->clients[client];
    assert(client < hub->options.clients && !c->weights);
    c->transport = (struct transport){hub_wait, hub_destination, hub_push, hub_flush};
    c->hub = hub;
    c->weights = weights;
    c->slice_offsets = slice_offsets;
    for (uint32_t s = 0; s < hub->model->slice_count; s++)
        give(hub, c, s);
    return &c->transport;
}

struct transport *memory_hub_join(struct memory_hub *hub, uint32_t client, float *weights)
{
    return memory_hub_join_stage(hub, client, weights, NULL);
}

const float *memory_hub_weights(const struct memory_hub *hub)
{
    return hub->weights;
}

struct kernel_loss memory_hub_loss(const struct memory_hub *hub, uint64_t step)
{
    return hub->losses[step];
}

const float *memory_hub_gradient(const struct memory_hub *hub)
{
    return hub->gradient;
}

uint64_t memory_hub_version(const struct memory_hub *hub)
{
    uint64_t version = UINT64_MAX;
    pthread_mutex_lock((pthread_mutex_t *)&hub->mutex);
    for (size_t s = 0; s < hub->model->slice_count; s++)
        version = hub->version[s] < version ? hub->version[s] : version;
    pthread_mutex_unlock((pthread_mutex_t *)&hub->mutex);
    return version;
}

uint64_t memory_hub_pushes(const struct memory_hub *hub)
{
    return hub->pushes;
}
