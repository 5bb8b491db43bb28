#include "server/shard_store.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/shard_sum.h"

#define LEAVES_MAX 16
#define SLICES 4
#define FLOATS 6038
#define FIRST_SLICE 3 /* the shard is not the first one */
static const struct shard_range slices[SLICES] = {{100, 37}, {137, 1}, {138, 1000}, {1138, 5000}};

/* ---- random numbers, gradients ---- */

static uint64_t mix(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static uint64_t random_state;

static uint32_t random_below(uint32_t n)
{
    random_state = mix(random_state);
    return (uint32_t)(random_state >> 33) % n;
}

/* Magnitudes differ, so that another order of summation gives other bits. */
static float gradient_of(uint64_t step, uint32_t leaf, size_t index)
{
    uint64_t bits = mix(step * 1000003 + leaf * 10007 + index * 17);
    float value = (float)(bits & 0xFFFFFF) / (float)0x1000000 - 0.5f;
    return ldexpf(value, (int)(bits >> 60) - 8);
}

static double weight_of(uint64_t step, uint32_t leaf)
{
    return 1.0 + (double)(mix(step * 31 + leaf) % 64);
}

static double loss_of(uint64_t step, uint32_t leaf)
{
    return (double)(mix(step * 37 + leaf) >> 12) * 0x1p-40;
}

/* An array that is read in pieces of any length, as a received payload is. */
struct array {
    unsigned references;
    size_t bytes;
    float *floats;
};

static unsigned references; /* of all arrays, beyond the test's own */

static size_t array_bytes(const void *gradient)
{
    return ((const struct array *)gradient)->bytes;
}

static void *array_ref(void *gradient)
{
    ((struct array *)gradient)->references++;
    references++;
    return gradient;
}

static void array_unref(void *gradient)
{
    struct array *array = gradient;
    assert_true(array->references > 1 && references > 0);
    array->references--;
    references--;
}

static void array_reader_init(struct rpc_payload_reader *reader, const void *gradient)
{
    reader->payload = gradient;
    reader->position = 0;
}

static bool array_reader_next(struct rpc_payload_reader *reader, const float **ret_run, size_t *ret_count)
{
    const struct array *array = (const void *)reader->payload;
    size_t count = array->bytes / sizeof(float);
    if (reader->position == count)
        return false;
    size_t take = 1 + random_below(random_below(2) ? 3 : 4000);
    if (take > count - reader->position)
        take = count - reader->position;
    *ret_run = array->floats + reader->position;
    *ret_count = take;
    reader->position += take;
    return true;
}

static const struct shard_gradient_ops array_ops = {array_bytes, array_ref, array_unref, array_reader_init,
                                                    array_reader_next};

/* The sum of a node over a slice, as the worker would send it. */
static float node_float(uint64_t step, struct tree_node node, size_t index)
{
    if (node.end - node.begin == 1)
        return gradient_of(step, node.begin, index);
    uint32_t middle = node.begin + tree_split(node.end - node.begin);
    return node_float(step, (struct tree_node){node.begin, middle}, index) +
           node_float(step, (struct tree_node){middle, node.end}, index);
}

static double node_sum(double (*of)(uint64_t, uint32_t), uint64_t step, struct tree_node node)
{
    if (node.end - node.begin == 1)
        return of(step, node.begin);
    uint32_t middle = node.begin + tree_split(node.end - node.begin);
    return node_sum(of, step, (struct tree_node){node.begin, middle}) +
           node_sum(of, step, (struct tree_node){middle, node.end});
}

static struct array *array_new(uint64_t step, struct tree_node node, uint32_t slice)
{
    const struct shard_range *range = &slices[slice - FIRST_SLICE];
    struct array *array = malloc(sizeof *array);
    assert_non_null(array);
    array->references = 1;
    array->bytes = range->count * sizeof(float);
    array->floats = malloc(array->bytes);
    assert_non_null(array->floats);
    for (size_t i = 0; i < range->count; i++)
        array->floats[i] = node_float(step, node, range->offset + i);
    return array;
}

static void array_free(struct array *array)
{
    free(array->floats);
    free(array);
}

/* ---- the reference: torch.optim.SGD, and the whole vector at once ---- */

struct reference {
    struct kernel_sgd sgd;
    float w[FLOATS], m[FLOATS];
};

static float sgd_one(const struct kernel_sgd *sgd, float g, float w, float *m)
{
    if (sgd->maximize)
        g = -g;
    if (sgd->weight_decay != 0)
        g += sgd->weight_decay * w;
    if (sgd->momentum != 0) {
        *m = sgd->first ? g : sgd->momentum * *m + (float)(1 - sgd->dampening) * g;
        g = sgd->nesterov ? g + sgd->momentum * *m : *m;
    }
    return w - sgd->lr * g;
}

static void reference_step(struct reference *reference, uint64_t step, uint32_t leaves)
{
    struct kernel_sgd sgd = reference->sgd;
    sgd.first = step == 1;
    struct tree_node root = {0, leaves};
    float weight = (float)node_sum(weight_of, step, root);
    for (size_t i = 0; i < FLOATS; i++)
        reference->w[i] =
            sgd_one(&sgd, node_float(step, root, slices[0].offset + i) / weight, reference->w[i], &reference->m[i]);
}

/* Plain kernels, so that the bits of the sums are what is compared here and nothing else. */
static tally_status plain_alloc(struct kernel_backend *backend, size_t bytes, void **ret_memory,
                                struct tally_error *err)
{
    (void)backend;
    *ret_memory = calloc(1, bytes);
    return *ret_memory ? TALLY_OK : tally_fail(err, TALLY_ENOMEM, "out of memory");
}

static void plain_free(struct kernel_backend *backend, void *memory)
{
    (void)backend;
    free(memory);
}

static void plain_sum(struct kernel_stream *stream, size_t n, float *dst, const float *a, const float *b)
{
    (void)stream;
    for (size_t i = 0; i < n; i++)
        dst[i] = a[i] + b[i];
}

static void plain_sgd(struct kernel_stream *stream, size_t n, const struct kernel_sgd *sgd, float weight,
                      const float *a, const float *b, const float *w, const float *m, float *w_out, float *m_out)
{
    (void)stream;
    for (size_t i = 0; i < n; i++) {
        float momentum = m ? m[i] : 0;
        w_out[i] = sgd_one(sgd, (b ? a[i] + b[i] : a[i]) / weight, w[i], &momentum);
        if (m_out)
            m_out[i] = momentum;
    }
}

static const struct kernels plain = {
    .name = "plain",
    .host_memory = true,
    .alloc = plain_alloc,
    .free = plain_free,
    .sum = plain_sum,
    .sgd = plain_sgd,
};

/* ---- a store under test ---- */

struct fixture {
    struct shard_sum *sum;
    struct shard_store *store;
    struct shard_store_config config;
    struct shard_wake wake;
    unsigned woken;
    struct reference reference;
    float previous[FLOATS];
};

static void count_wake(void *user)
{
    ((struct fixture *)user)->woken++;
}

static float first_weight(size_t index)
{
    return gradient_of(0, 99, index);
}

/* batch micro-batches of one sample a step. */
static void open_store(struct fixture *f, uint64_t samples, uint32_t batch, uint64_t steps, struct kernel_sgd sgd)
{
    assert_int_equal(shard_sum_new(&plain, NULL, &array_ops, &f->sum, NULL), TALLY_OK);
    f->woken = 0;
    f->wake.wake = count_wake;
    f->wake.user = f;
    atomic_init(&f->wake.wanted, false);
    f->config = (struct shard_store_config){.job = 5,
                                            .generation = 1,
                                            .first_slice = FIRST_SLICE,
                                            .slices = slices,
                                            .slice_count = SLICES,
                                            .sgd = sgd,
                                            .kernels = &plain,
                                            .sum = f->sum,
                                            .gradients = &array_ops,
                                            .wake = &f->wake};
    assert_int_equal(batches_init(&f->config.batches, samples, batch, 1, false, 0, steps, NULL), TALLY_OK);
    assert_int_equal(shard_store_new(&f->config, &f->store, NULL), TALLY_OK);
    size_t offset, count;
    float *weights = shard_store_first_weights(f->store, &offset, &count);
    assert_int_equal(offset, slices[0].offset);
    assert_int_equal(count, FLOATS);
    f->reference.sgd = sgd;
    for (size_t i = 0; i < FLOATS; i++) {
        weights[i] = f->reference.w[i] = first_weight(i);
        f->reference.m[i] = 0;
    }
}

static void close_store(struct fixture *f)
{
    shard_store_free(f->store);
    shard_sum_free(f->sum);
    assert_int_equal(references, 0);
}

static enum shard_taken push_with(struct fixture *f, struct shard_push push, struct shard_update *update,
                                  struct shard_refusal *refusal)
{
    struct tally_error err;
    struct shard_update other_update;
    struct shard_refusal other_refusal;
    return shard_store_push(f->store, &push, update ? update : &other_update, refusal ? refusal : &other_refusal, &err);
}

static struct shard_push push_of(uint64_t generation, uint64_t step, struct tree_node node, uint32_t slice,
                                 struct array *array)
{
    return (struct shard_push){.generation = generation,
                               .step = step,
                               .leaves = node,
                               .slice = slice,
                               .weight = node_sum(weight_of, step, node),
                               .loss_sum = node_sum(loss_of, step, node),
                               .correct = node_sum(weight_of, step, node) / 2,
                               .gradient = array};
}

/* Pushes a node's right gradient, and gives the test's own reference up. */
static enum shard_taken push_node(struct fixture *f, uint64_t generation, uint64_t step, struct tree_node node,
                                  uint32_t slice, struct shard_update *update, struct shard_refusal *refusal)
{
    static struct array *kept[4096];
    static size_t kept_count;
    struct array *array = array_new(step, node, slice);
    enum shard_taken taken = push_with(f, push_of(generation, step, node, slice, array), update, refusal);
    if (array->references > 1)
        kept[kept_count++] = array;
    else
        array_free(array);
    size_t left = 0;
    for (size_t i = 0; i < kept_count; i++) {
        if (kept[i]->references > 1)
            kept[left++] = kept[i];
        else
            array_free(kept[i]);
    }
    kept_count = left;
    assert_true(kept_count < 4000);
    return taken;
}

static void assert_weights(struct fixture *f, uint64_t version, const float *expected)
{
    for (uint32_t s = FIRST_SLICE; s < FIRST_SLICE + SLICES; s++) {
        size_t count;
        void *lease;
        const float *weights = shard_store_borrow(f->store, s, version, &count, &lease);
        assert_non_null(weights);
        assert_false(shard_store_idle(f->store));
        assert_int_equal(count, slices[s - FIRST_SLICE].count);
        size_t at = slices[s - FIRST_SLICE].offset - slices[0].offset;
        assert_memory_equal(weights, expected + at, count * sizeof(float));
        shard_store_release(lease);
    }
    assert_true(shard_store_idle(f->store));
}

/* ---- any order, any repetition, any gang ---- */

struct named {
    struct tree_node node;
    uint32_t slice;
};

static size_t list_pushes(uint32_t leaves, uint32_t ranks, struct named *list)
{
    size_t count = 0;
    for (uint32_t r = 0; r < ranks; r++) {
        struct tree_node share = tree_share(leaves, r, ranks), cover[TREE_COVER_MAX];
        size_t nodes = tree_cover(leaves, share.begin, share.end, cover);
        for (size_t i = 0; i < nodes; i++)
            for (uint32_t s = 0; s < SLICES; s++)
                list[count++] = (struct named){cover[i], FIRST_SLICE + s};
    }
    for (size_t i = count; i > 1; i--) {
        size_t j = random_below((uint32_t)i);
        struct named other = list[j];
        list[j] = list[i - 1];
        list[i - 1] = other;
    }
    return count;
}

/* What ought to happen, from sets of leaves alone. */
struct oracle {
    uint32_t leaves;
    uint32_t have[SLICES]; /* a bit a leaf of the step; all: applied */
};

static enum shard_taken expect(struct oracle *oracle, const struct named *push)
{
    uint32_t *have = &oracle->have[push->slice - FIRST_SLICE];
    uint32_t all = (1u << oracle->leaves) - 1;
    uint32_t brings = ((1u << push->node.end) - 1) & ~((1u << push->node.begin) - 1);
    if ((*have & brings) == brings)
        return SHARD_REPEATED;
    *have |= brings;
    return *have == all ? SHARD_UPDATED : SHARD_HELD;
}

static void push_noise(struct fixture *f, uint64_t generation, uint64_t step, uint32_t leaves)
{
    uint32_t slice = FIRST_SLICE + random_below(SLICES);
    struct tree_node leaf = {0, 1};
    struct shard_refusal refusal;
    switch (random_below(5)) {
    case 0: /* of a step that was applied */
        if (step > 1)
            assert_int_equal(push_node(f, generation, step - 1, leaf, slice, NULL, NULL), SHARD_REPEATED);
        break;
    case 1:
        assert_int_equal(push_node(f, generation, step + 1, leaf, slice, NULL, &refusal), SHARD_REFUSED);
        assert_int_equal(refusal.code, TALLY__V1__REFUSAL__CODE__WRONG_STEP);
        break;
    case 2:
        if (generation > 1) {
            assert_int_equal(push_node(f, generation - 1, step, leaf, slice, NULL, &refusal), SHARD_REFUSED);
            assert_int_equal(refusal.code, TALLY__V1__REFUSAL__CODE__OLD_GENERATION);
        }
        break;
    case 3:
        if (shard_store_slice_version(f->store, slice) < step) {
            struct array array = {.references = 1, .bytes = 4};
            struct shard_push push = push_of(generation, step, leaf, slice, &array);
            push.leaves.end = leaves + 1;
            assert_int_equal(push_with(f, push, NULL, &refusal), SHARD_REFUSED);
            assert_int_equal(refusal.code, TALLY__V1__REFUSAL__CODE__NOT_A_NODE);
        }
        break;
    default:
        break;
    }
}

static void run_pushes(struct fixture *f, struct oracle *oracle, uint64_t generation, uint64_t step,
                       const struct named *list, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const struct named *push = random_below(4) == 0 ? &list[random_below((uint32_t)i + 1)] : &list[i];
        for (int again = 0; again < 2; again++, push = &list[i]) {
            struct shard_update update;
            enum shard_taken expected = expect(oracle, push);
            assert_int_equal(push_node(f, generation, step, push->node, push->slice, &update, NULL), expected);
            if (expected != SHARD_UPDATED)
                continue;
            struct tree_node root = {0, oracle->leaves};
            assert_int_equal(update.slice, push->slice);
            assert_int_equal(update.version, step);
            assert_true(update.weight == node_sum(weight_of, step, root));
            assert_true(update.loss_sum == node_sum(loss_of, step, root));
            assert_true(update.correct == node_sum(weight_of, step, root) / 2);
        }
        if (shard_store_version(f->store) < step)
            push_noise(f, generation, step, oracle->leaves);
    }
}

static void run_job(struct fixture *f, uint32_t ranks, bool change)
{
    struct named list[LEAVES_MAX * SLICES];
    uint64_t generation = 1;
    for (uint64_t step = 1; step <= f->config.batches.steps; step++) {
        struct oracle oracle = {.leaves = batches_step(&f->config.batches, step).leaves};
        assert_int_equal(shard_store_version(f->store), step - 1);
        memcpy(f->previous, f->reference.w, sizeof f->previous);
        reference_step(&f->reference, step, oracle.leaves);
        size_t count = list_pushes(oracle.leaves, ranks, list);
        if (change) { /* part of the step from one gang, and the whole of it from the next */
            run_pushes(f, &oracle, generation, step, list, random_below((uint32_t)count + 1));
            shard_store_set_generation(f->store, ++generation);
            ranks = 1 + random_below(5);
            count = list_pushes(oracle.leaves, ranks, list);
        }
        run_pushes(f, &oracle, generation, step, list, count);
        assert_int_equal(references, 0);
        assert_int_equal(shard_store_version(f->store), step);
        assert_int_equal(shard_store_oldest(f->store), step - 1);
        assert_weights(f, step, f->reference.w);
        assert_weights(f, step - 1, f->previous);
    }
}

static struct kernel_sgd some_sgd(uint32_t kind)
{
    struct kernel_sgd sgd = {.lr = 0.05f};
    if (kind % 4 == 1)
        sgd.momentum = 0.9f;
    if (kind % 4 == 2)
        sgd = (struct kernel_sgd){.lr = 0.1f, .momentum = 0.5f, .dampening = 0.25, .weight_decay = 0.01f};
    if (kind % 4 == 3)
        sgd = (struct kernel_sgd){.lr = 0.1f, .momentum = 0.9f, .nesterov = true, .maximize = true};
    return sgd;
}

static void test_any_order(void **state)
{
    (void)state;
    static struct fixture f;
    for (uint32_t leaves = 1; leaves <= LEAVES_MAX; leaves++)
        for (uint32_t ranks = 1; ranks <= leaves; ranks += leaves > 8 ? 2 : 1)
            for (int change = 0; change < 2; change++) {
                random_state = mix(leaves * 1000 + ranks * 10 + (uint32_t)change);
                /* The second step is a short one where there is more than one leaf. */
                open_store(&f, 2 * leaves - leaves / 2, leaves, 4, some_sgd(leaves + ranks));
                run_job(&f, ranks, change != 0);
                close_store(&f);
            }
}

/* ---- single cases ---- */

static void test_refusals(void **state)
{
    (void)state;
    static struct fixture f;
    open_store(&f, 4, 4, 3, some_sgd(1));
    struct tree_node left = {0, 2}, leaf = {2, 3};
    struct shard_refusal refusal;
    struct array *array = array_new(1, left, FIRST_SLICE);
    const struct shard_push good = push_of(1, 1, left, FIRST_SLICE, array);
    struct {
        struct shard_push push;
        Tally__V1__Refusal__Code code;
        const char *says;
    } cases[] = {
        {good, TALLY__V1__REFUSAL__CODE__OLD_GENERATION, "generation 0"},
        {good, TALLY__V1__REFUSAL__CODE__UNKNOWN, "generation 2"},
        {good, TALLY__V1__REFUSAL__CODE__WRONG_SLICE, "slice 2 "},
        {good, TALLY__V1__REFUSAL__CODE__WRONG_SLICE, "slice 7 "},
        {good, TALLY__V1__REFUSAL__CODE__WRONG_STEP, "step 0 "},
        {good, TALLY__V1__REFUSAL__CODE__WRONG_STEP, "step 4 of a job of 3"},
        {good, TALLY__V1__REFUSAL__CODE__WRONG_STEP, "step 2 of slice 3 while step 1"},
        {good, TALLY__V1__REFUSAL__CODE__NOT_A_NODE, "[1, 3)"},
        {good, TALLY__V1__REFUSAL__CODE__NOT_A_NODE, "[2, 2)"},
        {good, TALLY__V1__REFUSAL__CODE__NOT_A_NODE, "[0, 4294967295)"},
        {good, TALLY__V1__REFUSAL__CODE__WRONG_SIZE, "148 bytes of gradient for slice 4"},
        {good, TALLY__V1__REFUSAL__CODE__WRONG_WEIGHT, "weight -1"},
        {good, TALLY__V1__REFUSAL__CODE__WRONG_WEIGHT, "weight nan"},
        {good, TALLY__V1__REFUSAL__CODE__WRONG_WEIGHT, "weight inf"},
    };
    cases[0].push.generation = 0;
    cases[1].push.generation = 2;
    cases[2].push.slice = FIRST_SLICE - 1;
    cases[3].push.slice = FIRST_SLICE + SLICES;
    cases[4].push.step = 0;
    cases[5].push.step = 4;
    cases[6].push.step = 2;
    cases[7].push.leaves = (struct tree_node){1, 3};
    cases[8].push.leaves = (struct tree_node){2, 2};
    cases[9].push.leaves = (struct tree_node){0, UINT32_MAX};
    cases[10].push.slice = FIRST_SLICE + 1;
    cases[11].push.weight = -1;
    cases[12].push.weight = (double)NAN;
    cases[13].push.weight = (double)INFINITY;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(push_with(&f, cases[i].push, NULL, &refusal), SHARD_REFUSED);
        assert_int_equal(refusal.code, cases[i].code);
        if (!strstr(refusal.reason, cases[i].says))
            fail_msg("\"%s\" does not say \"%s\"", refusal.reason, cases[i].says);
        assert_int_equal(array->references, 1);
    }
    assert_int_equal(push_with(&f, good, NULL, NULL), SHARD_HELD);
    /* The weight of a node is the same for every slice. */
    struct array *other = array_new(1, left, FIRST_SLICE + 1);
    struct shard_push wrong = push_of(1, 1, left, FIRST_SLICE + 1, other);
    wrong.weight += 1;
    assert_int_equal(push_with(&f, wrong, NULL, &refusal), SHARD_REFUSED);
    assert_int_equal(refusal.code, TALLY__V1__REFUSAL__CODE__WRONG_WEIGHT);
    assert_non_null(strstr(refusal.reason, "came before"));
    assert_int_equal(push_node(&f, 1, 1, leaf, FIRST_SLICE, NULL, NULL), SHARD_HELD);

    struct shard_counts counts = shard_store_counts(f.store);
    assert_int_equal(counts.refused, sizeof cases / sizeof *cases + 1);
    assert_int_equal(counts.taken, 2);
    assert_int_equal(counts.repeated, 0);
    char text[128];
    assert_string_equal(shard_store_describe(f.store, text, sizeof text),
                        "step 1: 0 of 4 slices updated, slice 3 waits for micro-batch 3");
    close_store(&f); /* with a step half done */
    array_free(other);
    array_free(array);
}

/* A slice that has been updated takes no later step before its neighbours have been. */
static void test_no_slice_runs_ahead(void **state)
{
    (void)state;
    static struct fixture f;
    open_store(&f, 1, 1, 5, some_sgd(1));
    struct tree_node root = {0, 1};
    struct shard_refusal refusal;
    assert_int_equal(shard_store_oldest(f.store), 0);
    for (uint32_t s = FIRST_SLICE; s < FIRST_SLICE + SLICES; s++) {
        assert_int_equal(push_node(&f, 1, 1, root, s, NULL, NULL), SHARD_UPDATED);
        assert_int_equal(shard_store_slice_version(f.store, s), 1);
        bool last = s + 1 == FIRST_SLICE + SLICES;
        assert_int_equal(shard_store_version(f.store), last ? 1 : 0);
        assert_int_equal(shard_store_oldest(f.store), 0);
        if (last)
            break;
        assert_int_equal(push_node(&f, 1, 2, root, s, NULL, &refusal), SHARD_REFUSED);
        assert_int_equal(refusal.code, TALLY__V1__REFUSAL__CODE__WRONG_STEP);
    }
    assert_int_equal(push_node(&f, 1, 2, root, FIRST_SLICE, NULL, NULL), SHARD_UPDATED);
    assert_int_equal(shard_store_version(f.store), 1);
    assert_int_equal(shard_store_oldest(f.store), 1);
    size_t count;
    void *lease;
    assert_null(shard_store_borrow(f.store, FIRST_SLICE, 0, &count, &lease));
    assert_null(shard_store_borrow(f.store, FIRST_SLICE, 3, &count, &lease));
    close_store(&f);
}

/* Weights that are being sent are not overwritten; whoever releases them wakes the shard. */
static void test_waits_for_readers(void **state)
{
    (void)state;
    static struct fixture f;
    open_store(&f, 2, 2, 5, some_sgd(1));
    struct tree_node root = {0, 2}, leaf[2] = {{0, 1}, {1, 2}};
    struct shard_update update;
    size_t count;
    void *lease[2];
    reference_step(&f.reference, 1, 2);
    memcpy(f.previous, f.reference.w, sizeof f.previous);
    const float *first = NULL;
    for (int i = 0; i < 2; i++)
        first = shard_store_borrow(f.store, FIRST_SLICE, 0, &count, &lease[i]);
    for (uint32_t s = FIRST_SLICE; s < FIRST_SLICE + SLICES; s++)
        assert_int_equal(push_node(&f, 1, 1, root, s, NULL, NULL), SHARD_UPDATED);
    /* Version 2 goes where version 0 is. */
    for (uint32_t s = FIRST_SLICE + 1; s < FIRST_SLICE + SLICES; s++)
        assert_int_equal(push_node(&f, 1, 2, root, s, NULL, NULL), SHARD_UPDATED);
    assert_int_equal(push_node(&f, 1, 2, leaf[1], FIRST_SLICE, NULL, NULL), SHARD_HELD);
    assert_int_equal(push_node(&f, 1, 2, leaf[0], FIRST_SLICE, NULL, NULL), SHARD_WAITS);
    assert_int_equal(push_node(&f, 1, 2, leaf[0], FIRST_SLICE, NULL, NULL), SHARD_REPEATED);
    assert_int_equal(push_node(&f, 1, 2, root, FIRST_SLICE, NULL, NULL), SHARD_REPEATED);
    for (size_t i = 0; i < count; i++)
        assert_true(first[i] == first_weight(i));
    assert_true(atomic_load(&f.wake.wanted));
    uint32_t slice;
    unsigned readers;
    assert_int_equal(shard_store_waiting(f.store, &slice, &readers), 1);
    assert_int_equal(slice, FIRST_SLICE);
    assert_int_equal(readers, 2);
    assert_false(shard_store_retry(f.store, &update));
    shard_store_release(lease[0]);
    assert_int_equal(f.woken, 1);
    assert_false(shard_store_retry(f.store, &update));
    shard_store_release(lease[1]);
    assert_int_equal(f.woken, 2);
    shard_store_hold_updates(f.store, true);
    assert_false(shard_store_retry(f.store, &update));
    shard_store_hold_updates(f.store, false);
    assert_true(shard_store_retry(f.store, &update));
    assert_int_equal(update.slice, FIRST_SLICE);
    assert_int_equal(update.version, 2);
    assert_false(shard_store_retry(f.store, &update));
    assert_int_equal(references, 0);
    reference_step(&f.reference, 2, 2);
    assert_weights(&f, 2, f.reference.w);
    assert_weights(&f, 1, f.previous);
    close_store(&f);
}

/* A step without any counted target: 0/0 as in PyTorch, and the shard goes on. A gradient of NaN is data as well. */
/* A store, and what its releases look at, may go as soon as nothing is borrowed: also while the thread that released
 * the last buffer is not yet out of it. */
#define LOANS 100

static _Atomic(void *) loan;

static void *release_loans(void *arg)
{
    for (int i = 0; i < LOANS; i++) {
        void *lease;
        while (!(lease = atomic_exchange(&loan, NULL)))
            sched_yield();
        shard_store_release(lease);
    }
    return arg;
}

static void test_goes_behind_the_last_release(void **state)
{
    (void)state;
    static struct fixture f;
    pthread_t thread;
    open_store(&f, 2, 2, 5, some_sgd(1));
    assert_int_equal(pthread_create(&thread, NULL, release_loans, NULL), 0);
    for (int i = 0; i < LOANS; i++) {
        struct shard_wake *wake = malloc(sizeof *wake);
        assert_non_null(wake);
        *wake = (struct shard_wake){.wake = count_wake, .user = &f};
        f.config.wake = wake;
        struct shard_store *store = NULL;
        assert_int_equal(shard_store_new(&f.config, &store, NULL), TALLY_OK);
        size_t count;
        void *lease;
        assert_non_null(shard_store_borrow(store, FIRST_SLICE, 0, &count, &lease));
        atomic_store(&loan, lease);
        while (!shard_store_idle(store))
            ;
        shard_store_free(store);
        shard_wake_settle(wake);
        free(wake);
    }
    assert_int_equal(pthread_join(thread, NULL), 0);
    close_store(&f);
}

static void test_nan(void **state)
{
    (void)state;
    static struct fixture f;
    open_store(&f, 2, 2, 5, some_sgd(0));
    struct tree_node leaf[2] = {{0, 1}, {1, 2}};
    struct shard_update update;
    float zeros[5000] = {0}, odd[5000] = {0};
    odd[0] = NAN;
    for (uint32_t s = FIRST_SLICE; s < FIRST_SLICE + SLICES; s++) {
        struct array arrays[2];
        for (int i = 0; i < 2; i++) {
            arrays[i] = (struct array){1, slices[s - FIRST_SLICE].count * sizeof(float), i == 0 ? odd : zeros};
            struct shard_push push = push_of(1, 1, leaf[i], s, &arrays[i]);
            push.weight = 1;
            push.loss_sum = (double)NAN;
            assert_int_equal(push_with(&f, push, &update, NULL), i == 0 ? SHARD_HELD : SHARD_UPDATED);
        }
    }
    assert_true(isnan(update.loss_sum));
    size_t count;
    void *lease;
    const float *w = shard_store_borrow(f.store, FIRST_SLICE, 1, &count, &lease);
    assert_true(isnan(w[0]));
    for (size_t i = 1; i < count; i++)
        assert_true(w[i] == first_weight(i));
    shard_store_release(lease);
    for (uint32_t s = FIRST_SLICE; s < FIRST_SLICE + SLICES; s++) {
        struct array array = {1, slices[s - FIRST_SLICE].count * sizeof(float), zeros};
        struct shard_push push = push_of(1, 2, (struct tree_node){0, 2}, s, &array);
        push.weight = 0;
        assert_int_equal(push_with(&f, push, &update, NULL), SHARD_UPDATED);
    }
    w = shard_store_borrow(f.store, FIRST_SLICE, 2, &count, &lease);
    for (size_t i = 0; i < count; i++)
        assert_true(isnan(w[i]));
    shard_store_release(lease);
    close_store(&f);
}

static void test_no_slices(void **state)
{
    (void)state;
    static struct fixture f;
    open_store(&f, 2, 2, 5, some_sgd(0));
    struct shard_store *store;
    f.config.slice_count = 0;
    assert_int_equal(shard_store_new(&f.config, &store, NULL), TALLY_OK);
    assert_int_equal(shard_store_version(store), 5);
    assert_int_equal(shard_store_oldest(store), 0);
    assert_int_equal(shard_store_parameter_bytes(store), 0);
    struct shard_update update;
    struct shard_refusal refusal;
    struct array array = {.references = 1};
    struct shard_push push = push_of(1, 1, (struct tree_node){0, 1}, 0, &array);
    assert_int_equal(shard_store_push(store, &push, &update, &refusal, NULL), SHARD_REFUSED);
    assert_int_equal(refusal.code, TALLY__V1__REFUSAL__CODE__WRONG_SLICE);
    shard_store_free(store);
    close_store(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_order),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_no_slice_runs_ahead),
        cmocka_unit_test(test_waits_for_readers),
        cmocka_unit_test(test_goes_behind_the_last_release),
        cmocka_unit_test(test_nan),
        cmocka_unit_test(test_no_slices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
