#include "server/shard_store.h"

#include <inttypes.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"

/* A sum over some leaves: a push as it came, or siblings added. */
struct held {
    struct held *next;
    struct tree_node leaves;
    double weight, loss_sum, correct;
    void *gradient; /* a reference, or NULL and */
    float *floats;  /* a buffer of the pool */
    size_t bytes;
};

/* One of the two buffers of a slice, as those who read it see it. */
struct buffer {
    atomic_uint readers;
    struct shard_wake *wake;
};

/* Version v is in buffer v & 1. */
struct store_slice {
    size_t offset, count; /* floats, from the store's first */
    uint64_t version;
    struct held
        *held; /* of step version + 1, by their leaves; disjoint; no two of them are siblings while last is NULL */
    struct held *last; /* with held it completes the tree: waits for its buffer */
    struct buffer buffers[2];
};

/* The weight that a node of the tree brought first. */
struct node_weight {
    uint64_t step;
    double weight;
};

struct shard_store {
    struct shard_store_config config; /* without slices */
    struct store_slice *slices;
    size_t offset, count; /* floats of the flat vector */
    size_t longest;       /* floats of the longest slice */
    float *weights[2], *momentum[2];
    uint64_t version; /* the lowest of the slices' */
    uint32_t behind;  /* slices at that version */
    uint32_t leaves;  /* of step version + 1; 0 behind the last step */
    uint32_t waiting; /* slices with a last */
    bool hold_updates;
    struct node_weight *weights_of_nodes; /* by node_index; 2 * the most leaves of a step */
    struct held *spare;                   /* records */
    float **spare_buffers;                /* of `longest` floats */
    size_t spare_buffer_count, spare_buffer_room;
    size_t held_bytes;
    struct shard_counts counts;
};

/* ---- life ---- */

static tally_status no_memory(struct tally_error *err, const struct shard_store *store, const char *what)
{
    return tally_fail(err, TALLY_ENOMEM, "out of memory for %s of job %" PRIu64 " (%zu parameters here)", what,
                      store->config.job, store->count);
}

static void enter_version(struct shard_store *store, uint64_t version)
{
    store->version = version;
    store->behind = store->config.slice_count;
    store->leaves = 0;
    if (version < store->config.batches.steps)
        store->leaves = batches_step(&store->config.batches, version + 1).leaves;
}

static tally_status take_slices(struct shard_store *store, const struct shard_range *slices, uint32_t count,
                                struct tally_error *err)
{
    store->slices = calloc(count ? count : 1, sizeof *store->slices);
    if (!store->slices)
        return no_memory(err, store, "slices");
    store->offset = count ? slices[0].offset : 0;
    for (uint32_t i = 0; i < count; i++) {
        struct store_slice *slice = &store->slices[i];
        tally_check(slices[i].offset == store->offset + store->count && slices[i].count > 0);
        slice->offset = store->count;
        slice->count = slices[i].count;
        slice->version = store->config.start_version;
        for (int b = 0; b < 2; b++) {
            atomic_init(&slice->buffers[b].readers, 0);
            slice->buffers[b].wake = store->config.wake;
        }
        store->count += slices[i].count;
        if (slices[i].count > store->longest)
            store->longest = slices[i].count;
    }
    return TALLY_OK;
}

static tally_status take_memory(struct shard_store *store, struct tally_error *err)
{
    const struct shard_store_config *config = &store->config;
    size_t most_leaves = batches_step(&config->batches, 1).leaves;
    store->weights_of_nodes = calloc(2 * most_leaves, sizeof *store->weights_of_nodes);
    if (!store->weights_of_nodes)
        return no_memory(err, store, "the weights of a step's tree");
    for (int b = 0; b < 2 && store->count > 0; b++) {
        void *memory;
        tally_status status = config->kernels->alloc(config->backend, store->count * sizeof(float), &memory, err);
        if (status != TALLY_OK)
            return no_memory(err, store, "the weights");
        store->weights[b] = memory;
        if (config->sgd.momentum == 0)
            continue;
        status = config->kernels->alloc(config->backend, store->count * sizeof(float), &memory, err);
        if (status != TALLY_OK)
            return no_memory(err, store, "the momentum");
        store->momentum[b] = memory;
    }
    return TALLY_OK;
}

tally_status shard_store_new(const struct shard_store_config *config, struct shard_store **ret_store,
                             struct tally_error *err)
{
    tally_check(config->start_version <= config->batches.steps);
    struct shard_store *store = calloc(1, sizeof *store);
    if (!store)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for the slices of job %" PRIu64, config->job);
    store->config = *config;
    store->config.slices = NULL;
    tally_status status = take_slices(store, config->slices, config->slice_count, err);
    if (status == TALLY_OK)
        status = take_memory(store, err);
    if (status != TALLY_OK) {
        shard_store_free(store);
        return status;
    }
    enter_version(store, config->start_version);
    *ret_store = store;
    return TALLY_OK;
}

static void spare_record(struct shard_store *store, struct held *held)
{
    held->next = store->spare;
    store->spare = held;
}

/* Gives back what a record holds, and the record. */
static void drop(struct shard_store *store, struct held *held)
{
    store->held_bytes -= held->bytes;
    if (held->gradient)
        store->config.gradients->unref(held->gradient);
    if (held->floats)
        store->spare_buffers[store->spare_buffer_count++] = held->floats;
    spare_record(store, held);
}

void shard_store_free(struct shard_store *store)
{
    if (!store)
        return;
    tally_check(!store->slices || shard_store_idle(store));
    for (uint32_t i = 0; store->slices && i < store->config.slice_count; i++) {
        struct store_slice *slice = &store->slices[i];
        for (struct held *held = slice->held, *next; held; held = next) {
            next = held->next;
            drop(store, held);
        }
        if (slice->last)
            drop(store, slice->last);
    }
    for (struct held *held = store->spare, *next; held; held = next) {
        next = held->next;
        free(held);
    }
    for (size_t i = 0; i < store->spare_buffer_count; i++)
        free(store->spare_buffers[i]);
    free(store->spare_buffers);
    for (int b = 0; b < 2; b++) {
        if (store->weights[b])
            store->config.kernels->free(store->config.backend, store->weights[b]);
        if (store->momentum[b])
            store->config.kernels->free(store->config.backend, store->momentum[b]);
    }
    free(store->weights_of_nodes);
    free(store->slices);
    free(store);
}

float *shard_store_first_weights(struct shard_store *store, size_t *ret_offset, size_t *ret_count)
{
    *ret_offset = store->offset;
    *ret_count = store->count;
    return store->weights[store->config.start_version & 1];
}

void shard_store_set_generation(struct shard_store *store, uint64_t generation)
{
    tally_check(generation >= store->config.generation);
    store->config.generation = generation;
}

/* ---- pools: what a step takes comes back within it, so that after the first steps nothing is allocated ---- */

static struct held *new_record(struct shard_store *store)
{
    struct held *held = store->spare;
    if (held)
        store->spare = held->next;
    else
        held = malloc(sizeof *held);
    if (held)
        *held = (struct held){0};
    return held;
}

/* Room in the list of spare buffers is made when a buffer is: giving back cannot fail. */
static float *new_buffer(struct shard_store *store)
{
    if (store->spare_buffer_count > 0)
        return store->spare_buffers[--store->spare_buffer_count];
    float **list = realloc(store->spare_buffers, (store->spare_buffer_room + 1) * sizeof *list);
    if (!list)
        return NULL;
    store->spare_buffers = list;
    float *buffer = aligned_alloc(64, (store->longest * sizeof(float) + 63) / 64 * 64);
    if (buffer)
        store->spare_buffer_room++;
    return buffer;
}

/* ---- updates ---- */

/* Where the last of count terms brings the sum: the pieces of a path towards the root. */
struct path {
    struct shard_term terms[SHARD_TERMS_MAX];
    struct held *siblings[SHARD_TERMS_MAX]; /* terms[i] for i >= 1; still in the slice's list */
    size_t count;
    struct tree_node leaves;
    double weight, loss_sum, correct;
};

static bool same(struct tree_node a, struct tree_node b)
{
    return a.begin == b.begin && a.end == b.end;
}

static struct held *find(const struct store_slice *slice, struct tree_node leaves)
{
    for (struct held *held = slice->held; held && held->leaves.begin <= leaves.begin; held = held->next)
        if (same(held->leaves, leaves))
            return held;
    return NULL;
}

static void take_out(struct store_slice *slice, const struct held *held)
{
    struct held **link = &slice->held;
    while (*link != held)
        link = &(*link)->next;
    *link = held->next;
}

static void put_in(struct store_slice *slice, struct held *held)
{
    struct held **link = &slice->held;
    while (*link && (*link)->leaves.begin < held->leaves.begin)
        link = &(*link)->next;
    held->next = *link;
    *link = held;
}

/* As far towards the root as siblings are held. */
static void climb(const struct shard_store *store, const struct store_slice *slice, const struct held *from,
                  struct path *path)
{
    path->terms[0] = (struct shard_term){.gradient = from->gradient, .floats = from->floats};
    path->count = 1;
    path->leaves = from->leaves;
    path->weight = from->weight;
    path->loss_sum = from->loss_sum;
    path->correct = from->correct;
    while (path->leaves.end - path->leaves.begin < store->leaves) {
        struct tree_node sibling = tree_sibling(store->leaves, path->leaves);
        struct held *held = find(slice, sibling);
        if (!held)
            return;
        bool left = sibling.begin < path->leaves.begin;
        tally_check(path->count < SHARD_TERMS_MAX);
        path->siblings[path->count] = held;
        path->terms[path->count++] = (struct shard_term){held->gradient, held->floats, left};
        path->leaves.begin = left ? sibling.begin : path->leaves.begin;
        path->leaves.end = left ? path->leaves.end : sibling.end;
        path->weight = left ? held->weight + path->weight : path->weight + held->weight;
        path->loss_sum = left ? held->loss_sum + path->loss_sum : path->loss_sum + held->loss_sum;
        path->correct = left ? held->correct + path->correct : path->correct + held->correct;
    }
}

static bool whole(const struct shard_store *store, const struct path *path)
{
    return path->leaves.end - path->leaves.begin == store->leaves;
}

static bool may_update(struct shard_store *store, struct store_slice *slice)
{
    struct buffer *next = &slice->buffers[(slice->version + 1) & 1];
    if (!store->hold_updates && atomic_load(&next->readers) == 0)
        return true;
    /* In this order here and the other way round in shard_store_release, so that one of the two sees the other. */
    atomic_store(&store->config.wake->wanted, true);
    return !store->hold_updates && atomic_load(&next->readers) == 0;
}

static void update(struct shard_store *store, struct store_slice *slice, const struct path *path,
                   struct shard_update *ret_update)
{
    int from = (int)(slice->version & 1), to = 1 - from;
    bool momentum = store->momentum[0] != NULL;
    struct kernel_sgd options = store->config.sgd;
    options.first = slice->version == store->config.start_version;
    /* The other buffer has the version before last: a push of this step proves that its worker was sent the last
     * version of every slice by every shard, so nobody will ask for what is overwritten. */
    tally_check(slice->version == store->version && atomic_load(&slice->buffers[to].readers) == 0);
    struct shard_sgd sgd = {
        .options = &options,
        .weight = (float)path->weight,
        .w = store->weights[from] + slice->offset,
        .w_out = store->weights[to] + slice->offset,
        .m = momentum ? store->momentum[from] + slice->offset : NULL,
        .m_out = momentum ? store->momentum[to] + slice->offset : NULL,
    };
    shard_sum_sgd(store->config.sum, path->terms, path->count, slice->count, &sgd);
    while (slice->held) {
        struct held *held = slice->held;
        slice->held = held->next;
        drop(store, held);
    }
    slice->version++;
    *ret_update = (struct shard_update){
        .slice = store->config.first_slice + (uint32_t)(slice - store->slices),
        .version = slice->version,
        .weight = path->weight,
        .loss_sum = path->loss_sum,
        .correct = path->correct,
    };
    if (--store->behind == 0)
        enter_version(store, store->version + 1);
}

/* Adds the path up into one record. */
static bool combine(struct shard_store *store, struct store_slice *slice, const struct path *path)
{
    struct held *sum = NULL;
    for (size_t i = 1; i < path->count && !sum; i++)
        if (path->siblings[i]->floats)
            sum = path->siblings[i];
    float *buffer = sum ? sum->floats : new_buffer(store);
    if (!buffer)
        return false;
    shard_sum_into(store->config.sum, path->terms, path->count, slice->count, buffer);
    for (size_t i = 1; i < path->count; i++) {
        take_out(slice, path->siblings[i]);
        if (!sum)
            sum = path->siblings[i];
        else if (path->siblings[i] != sum)
            drop(store, path->siblings[i]);
    }
    if (sum->gradient)
        store->config.gradients->unref(sum->gradient);
    *sum = (struct held){.leaves = path->leaves,
                         .weight = path->weight,
                         .loss_sum = path->loss_sum,
                         .correct = path->correct,
                         .floats = buffer,
                         .bytes = sum->bytes};
    put_in(slice, sum);
    return true;
}

/* ---- pushes ---- */

static enum shard_taken refuse(struct shard_store *store, struct shard_refusal *ret, Tally__V1__Refusal__Code code,
                               const char *format, ...) __attribute__((format(printf, 4, 5)));

static enum shard_taken refuse(struct shard_store *store, struct shard_refusal *ret, Tally__V1__Refusal__Code code,
                               const char *format, ...)
{
    va_list args;
    va_start(args, format);
    ret->code = code;
    vsnprintf(ret->reason, sizeof ret->reason, format, args);
    va_end(args);
    store->counts.refused++;
    return SHARD_REFUSED;
}

/* A number of its own for every node of a tree: leaves have the even ones, the others are told by where they split. */
static size_t node_index(struct tree_node node)
{
    uint32_t n = node.end - node.begin;
    return n == 1 ? 2 * (size_t)node.begin : 2 * ((size_t)node.begin + tree_split(n)) - 1;
}

/* SHARD_HELD: nothing speaks against it so far. */
static enum shard_taken check_name(struct shard_store *store, const struct shard_push *push,
                                   struct shard_refusal *ret_refusal)
{
    const struct shard_store_config *config = &store->config;
    if (push->generation < config->generation)
        return refuse(store, ret_refusal, TALLY__V1__REFUSAL__CODE__OLD_GENERATION,
                      "a push of generation %" PRIu64 ": job %" PRIu64 " is at generation %" PRIu64, push->generation,
                      config->job, config->generation);
    if (push->generation > config->generation)
        return refuse(store, ret_refusal, TALLY__V1__REFUSAL__CODE__UNKNOWN,
                      "a push of generation %" PRIu64 ", which was not opened here: job %" PRIu64
                      " is at generation %" PRIu64,
                      push->generation, config->job, config->generation);
    if (push->slice < config->first_slice || push->slice - config->first_slice >= config->slice_count)
        return refuse(store, ret_refusal, TALLY__V1__REFUSAL__CODE__WRONG_SLICE,
                      "slice %" PRIu32 " is not of this shard, which has %" PRIu32 " from %" PRIu32 " on", push->slice,
                      config->slice_count, config->first_slice);
    if (push->step == 0 || push->step > config->batches.steps)
        return refuse(store, ret_refusal, TALLY__V1__REFUSAL__CODE__WRONG_STEP,
                      "step %" PRIu64 " of a job of %" PRIu64 " steps", push->step, config->batches.steps);
    if (push->step <= store->slices[push->slice - config->first_slice].version)
        return SHARD_REPEATED;
    if (push->step > store->version + 1)
        return refuse(store, ret_refusal, TALLY__V1__REFUSAL__CODE__WRONG_STEP,
                      "step %" PRIu64 " of slice %" PRIu32 " while step %" PRIu64 " is being summed", push->step,
                      push->slice, store->version + 1);
    return SHARD_HELD;
}

static enum shard_taken check_content(struct shard_store *store, const struct shard_push *push,
                                      struct shard_refusal *ret_refusal)
{
    const struct store_slice *slice = &store->slices[push->slice - store->config.first_slice];
    if (!tree_is_node(store->leaves, push->leaves))
        return refuse(store, ret_refusal, TALLY__V1__REFUSAL__CODE__NOT_A_NODE,
                      "micro-batches [%" PRIu32 ", %" PRIu32 ") are no node of the tree over the %" PRIu32
                      " of step %" PRIu64,
                      push->leaves.begin, push->leaves.end, store->leaves, push->step);
    size_t bytes = store->config.gradients->bytes(push->gradient);
    if (bytes != slice->count * sizeof(float))
        return refuse(store, ret_refusal, TALLY__V1__REFUSAL__CODE__WRONG_SIZE,
                      "%zu bytes of gradient for slice %" PRIu32 ", which has %zu", bytes, push->slice,
                      slice->count * sizeof(float));
    if (!isfinite(push->weight) || push->weight < 0)
        return refuse(store, ret_refusal, TALLY__V1__REFUSAL__CODE__WRONG_WEIGHT,
                      "weight %g of micro-batches [%" PRIu32 ", %" PRIu32 ") of step %" PRIu64
                      ": expected a finite number of at least 0",
                      push->weight, push->leaves.begin, push->leaves.end, push->step);
    struct node_weight *known = &store->weights_of_nodes[node_index(push->leaves)];
    if (known->step == push->step && known->weight != push->weight)
        return refuse(store, ret_refusal, TALLY__V1__REFUSAL__CODE__WRONG_WEIGHT,
                      "weight %g of micro-batches [%" PRIu32 ", %" PRIu32 ") of step %" PRIu64
                      ", for which %g came before",
                      push->weight, push->leaves.begin, push->leaves.end, push->step, known->weight);
    *known = (struct node_weight){.step = push->step, .weight = push->weight};
    return SHARD_HELD;
}

/* Drops what is held of these leaves, or answers that all of them are. Nodes of one tree lie inside each other or
 * apart. */
static bool make_way(struct shard_store *store, struct store_slice *slice, struct tree_node leaves)
{
    if (slice->last)
        return false;
    struct held **link = &slice->held;
    while (*link && (*link)->leaves.end <= leaves.begin)
        link = &(*link)->next;
    if (*link && (*link)->leaves.begin <= leaves.begin && (*link)->leaves.end >= leaves.end)
        return false;
    while (*link && (*link)->leaves.begin < leaves.end) {
        struct held *inside = *link;
        *link = inside->next;
        drop(store, inside);
    }
    return true;
}

/* A copy of *held that keeps its gradient. */
static struct held *keep(struct shard_store *store, const struct held *held)
{
    struct held *record = new_record(store);
    if (record) {
        *record = *held;
        store->held_bytes += record->bytes;
        store->config.gradients->ref(record->gradient);
    }
    return record;
}

static enum shard_taken take(struct shard_store *store, struct store_slice *slice, const struct held *come,
                             struct shard_update *ret_update, struct tally_error *err)
{
    struct path path;
    climb(store, slice, come, &path);
    if (whole(store, &path) && may_update(store, slice)) {
        update(store, slice, &path, ret_update);
        return SHARD_UPDATED;
    }
    if (!whole(store, &path) && path.count > 1) {
        if (combine(store, slice, &path))
            return SHARD_HELD;
        no_memory(err, store, "a partial sum of gradients");
        return SHARD_FAILED;
    }
    struct held *record = keep(store, come);
    if (!record) {
        no_memory(err, store, "a gradient's record");
        return SHARD_FAILED;
    }
    if (!whole(store, &path)) {
        put_in(slice, record);
        return SHARD_HELD;
    }
    slice->last = record;
    store->waiting++;
    return SHARD_WAITS;
}

enum shard_taken shard_store_push(struct shard_store *store, const struct shard_push *push,
                                  struct shard_update *ret_update, struct shard_refusal *ret_refusal,
                                  struct tally_error *err)
{
    enum shard_taken taken = check_name(store, push, ret_refusal);
    if (taken == SHARD_HELD)
        taken = check_content(store, push, ret_refusal);
    if (taken == SHARD_HELD) {
        struct store_slice *slice = &store->slices[push->slice - store->config.first_slice];
        struct held come = {.leaves = push->leaves,
                            .weight = push->weight,
                            .loss_sum = push->loss_sum,
                            .correct = push->correct,
                            .gradient = push->gradient,
                            .bytes = slice->count * sizeof(float)};
        if (make_way(store, slice, push->leaves))
            taken = take(store, slice, &come, ret_update, err);
        else
            taken = SHARD_REPEATED;
    }
    if (taken == SHARD_REPEATED)
        store->counts.repeated++;
    else if (taken != SHARD_REFUSED && taken != SHARD_FAILED)
        store->counts.taken++;
    return taken;
}

bool shard_store_retry(struct shard_store *store, struct shard_update *ret_update)
{
    uint32_t left = store->waiting;
    for (struct store_slice *slice = store->slices; left > 0; slice++) {
        if (!slice->last)
            continue;
        left--;
        if (!may_update(store, slice))
            continue;
        struct held *last = slice->last;
        struct path path;
        climb(store, slice, last, &path);
        tally_check(whole(store, &path));
        slice->last = NULL;
        store->waiting--;
        update(store, slice, &path, ret_update);
        drop(store, last);
        return true;
    }
    return false;
}

size_t shard_store_held_bytes(const struct shard_store *store)
{
    return store->held_bytes;
}

uint32_t shard_store_leaves(const struct shard_store *store)
{
    return store->leaves;
}

void shard_store_hold_updates(struct shard_store *store, bool on)
{
    store->hold_updates = on;
}

/* ---- what it holds ---- */

uint64_t shard_store_generation(const struct shard_store *store)
{
    return store->config.generation;
}

uint64_t shard_store_version(const struct shard_store *store)
{
    return store->config.slice_count > 0 ? store->version : store->config.batches.steps;
}

uint64_t shard_store_oldest(const struct shard_store *store)
{
    if (store->config.slice_count == 0)
        return 0;
    bool all_alike = store->behind == store->config.slice_count;
    return all_alike && store->version > store->config.start_version ? store->version - 1 : store->version;
}

static const struct store_slice *slice_at(const struct shard_store *store, uint32_t slice)
{
    tally_check(slice >= store->config.first_slice && slice - store->config.first_slice < store->config.slice_count);
    return &store->slices[slice - store->config.first_slice];
}

uint64_t shard_store_slice_version(const struct shard_store *store, uint32_t slice)
{
    return slice_at(store, slice)->version;
}

struct shard_counts shard_store_counts(const struct shard_store *store)
{
    return store->counts;
}

size_t shard_store_parameter_bytes(const struct shard_store *store)
{
    return store->count * sizeof(float);
}

uint32_t shard_store_waiting(const struct shard_store *store, uint32_t *ret_slice, unsigned *ret_readers)
{
    for (uint32_t i = 0; store->waiting > 0 && i < store->config.slice_count; i++) {
        const struct store_slice *slice = &store->slices[i];
        if (!slice->last)
            continue;
        *ret_slice = store->config.first_slice + i;
        *ret_readers = atomic_load(&slice->buffers[(slice->version + 1) & 1].readers);
        break;
    }
    return store->waiting;
}

static uint32_t first_behind(const struct shard_store *store)
{
    uint32_t i = 0;
    while (store->slices[i].version != store->version)
        i++;
    return i;
}

bool shard_store_missing(const struct shard_store *store, struct shard_missing *ret_missing)
{
    if (store->config.slice_count == 0 || store->waiting > 0 || store->leaves == 0)
        return false;
    uint32_t leaf = 0;
    const struct held *held = store->slices[first_behind(store)].held;
    for (; held && held->leaves.begin == leaf; held = held->next)
        leaf = held->leaves.end;
    *ret_missing = (struct shard_missing){store->config.first_slice + first_behind(store), store->leaves, leaf};
    return true;
}

const char *shard_store_describe(const struct shard_store *store, char *text, size_t size)
{
    const struct shard_store_config *config = &store->config;
    struct shard_missing missing;
    uint32_t slice = 0;
    unsigned readers = 0;
    if (config->slice_count == 0)
        snprintf(text, size, "has no slice");
    else if (store->leaves == 0)
        snprintf(text, size, "all %" PRIu64 " steps are applied", store->version);
    else if (shard_store_missing(store, &missing))
        snprintf(text, size,
                 "step %" PRIu64 ": %" PRIu32 " of %" PRIu32 " slices updated, slice %" PRIu32
                 " waits for micro-batch %" PRIu32,
                 store->version + 1, config->slice_count - store->behind, config->slice_count, missing.slice,
                 missing.leaf);
    else if (shard_store_waiting(store, &slice, &readers) > 0)
        snprintf(text, size, "step %" PRIu64 ": slice %" PRIu32 " waits for %u sends of its older weights to end",
                 store->version + 1, slice, readers);
    return text;
}

/* ---- reading weights ---- */

const float *shard_store_borrow(struct shard_store *store, uint32_t index, uint64_t version, size_t *ret_count,
                                void **ret_lease)
{
    struct store_slice *slice = &store->slices[slice_at(store, index) - store->slices];
    bool older = version + 1 == slice->version && slice->version > store->config.start_version;
    if (version != slice->version && !older)
        return NULL;
    struct buffer *buffer = &slice->buffers[version & 1];
    atomic_fetch_add(&buffer->readers, 1);
    *ret_count = slice->count;
    *ret_lease = buffer;
    return store->weights[version & 1] + slice->offset;
}

void shard_store_release(void *lease)
{
    struct buffer *buffer = lease;
    struct shard_wake *wake = buffer->wake; /* the store may be gone once nothing is borrowed */
    atomic_fetch_add(&wake->releasing, 1);
    atomic_fetch_sub(&buffer->readers, 1);
    if (atomic_load(&wake->wanted))
        wake->wake(wake->user);
    atomic_fetch_sub(&wake->releasing, 1);
}

void shard_wake_settle(struct shard_wake *wake)
{
    while (atomic_load(&wake->releasing) > 0)
        sched_yield();
}

bool shard_store_idle(const struct shard_store *store)
{
    for (uint32_t i = 0; i < store->config.slice_count; i++)
        for (int b = 0; b < 2; b++)
            if (atomic_load(&store->slices[i].buffers[b].readers) > 0)
                return false;
    return true;
}
