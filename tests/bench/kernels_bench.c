/*
 * Times the operations of a training step, one by one and together, without a server: forward, loss, gradients, SGD.
 *
 *   kernels_bench [--isa generic|avx2|avx512] [--seconds S] [--rows N] [model ...]     models: small mlp wide cnn
 * convs; default: all
 *
 * Every line is the time that one step in ten beats, over the steps that fit into S seconds (2 by default): other load
 * on the machine hardly shows in it.
 */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "kernels/kernels.h"

#define LAYERS_MAX 8
#define STEPS_MAX 20000

enum pass { FORWARD, WEIGHT, DATA, PASSES };
static const char *const pass_name[PASSES] = {"forward", "weight", "data"};

struct layer {
    char name[64];
    struct kernel_op_desc desc;
    struct kernel_op *op;
    struct kernel_args args;
    size_t weights, weight_rows, biases;
    double gflop;           /* of one pass */
    float *samples[PASSES]; /* us */
};

struct bench {
    const struct kernels *k;
    struct kernel_backend *backend;
    struct kernel_stream *stream;
    struct layer layer[LAYERS_MAX];
    size_t layers, rows, steps, parameters;
    float *step_us, *sgd_us;
    void *workspace;
    double seconds;
};

static void die(const char *what, const struct tally_error *err)
{
    fprintf(stderr, "kernels_bench: %s: %s\n", what, err ? err->message : "");
    exit(1);
}

static void *take(struct bench *b, size_t bytes)
{
    struct tally_error err;
    void *p;
    if (b->k->alloc(b->backend, bytes + 64, &p, &err))
        die("alloc", &err);
    return p;
}

static float *take_random(struct bench *b, size_t n, float scale)
{
    static uint32_t state = 1;
    float *p = take(b, n * sizeof *p);
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        p[i] = ((float)(state >> 8) * 0x1p-23f - 1.0f) * scale;
    }
    return p;
}

static size_t x_elements(const struct kernel_op_desc *d)
{
    return d->kind == KERNEL_LINEAR   ? d->linear.in
           : d->kind == KERNEL_CONV2D ? d->conv2d.in_channels * d->conv2d.in_height * d->conv2d.in_width
                                      : d->cross_entropy.classes;
}

static size_t y_elements(const struct kernel_op_desc *d)
{
    if (d->kind == KERNEL_LINEAR)
        return d->linear.out;
    if (d->kind != KERNEL_CONV2D)
        return 1;
    return d->conv2d.out_channels *
           (d->conv2d.pool ? d->conv2d.pool_height * d->conv2d.pool_width : d->conv2d.out_height * d->conv2d.out_width);
}

static struct layer *add_layer(struct bench *b, const struct kernel_op_desc *desc)
{
    struct layer *l = &b->layer[b->layers++];
    memset(l, 0, sizeof *l);
    l->desc = *desc;
    l->desc.rows = b->rows;
    l->desc.inputs = 1;
    l->desc.x_stride = b->k->row_stride(b->backend, x_elements(desc));
    l->desc.y_stride = b->k->row_stride(b->backend, y_elements(desc));
    return l;
}

static void add_linear(struct bench *b, size_t in, size_t out, bool relu)
{
    struct layer *l =
        add_layer(b, &(struct kernel_op_desc){.kind = KERNEL_LINEAR, .bias = true, .relu = relu, .linear = {in, out}});
    l->weights = in * out;
    l->biases = l->weight_rows = out;
    l->gflop = 2e-9 * (double)(b->rows * in * out);
    (void)snprintf(l->name, sizeof l->name, "linear %zu-%zu", in, out);
}

static void add_conv(struct bench *b, size_t in, size_t size, size_t out, size_t kernel, size_t padding, bool relu,
                     bool pool)
{
    struct kernel_op_desc d = {.kind = KERNEL_CONV2D, .bias = true, .relu = relu};
    const size_t side = size + 2 * padding - kernel + 1;
    d.conv2d.in_channels = in;
    d.conv2d.out_channels = out;
    d.conv2d.groups = 1;
    d.conv2d.in_height = d.conv2d.in_width = size;
    d.conv2d.out_height = d.conv2d.out_width = side;
    d.conv2d.window = (struct kernel_window){{kernel, kernel}, {1, 1}, {padding, padding}, {1, 1}};
    d.conv2d.pool = pool;
    d.conv2d.pool_window = (struct kernel_window){{2, 2}, {2, 2}, {0, 0}, {1, 1}};
    d.conv2d.pool_height = d.conv2d.pool_width = side / 2;
    struct layer *l = add_layer(b, &d);
    l->weights = in * out * kernel * kernel;
    l->biases = l->weight_rows = out;
    l->gflop = 2e-9 * (double)(b->rows * l->weights * side * side);
    (void)snprintf(l->name, sizeof l->name, "conv %zu->%zu k%zu %zux%zu%s", in, out, kernel, size, size,
                   pool ? " pool" : "");
}

static void add_loss(struct bench *b, size_t classes)
{
    struct layer *l =
        add_layer(b, &(struct kernel_op_desc){.kind = KERNEL_CROSS_ENTROPY, .cross_entropy = {classes, -100, 0}});
    (void)snprintf(l->name, sizeof l->name, "cross_entropy %zu", classes);
}

/* Buffers. chain: each layer reads what the one before wrote. */
static void connect(struct bench *b, bool chain)
{
    struct tally_error err;
    size_t workspace = 0;
    for (size_t i = 0; i < b->layers; i++) {
        struct layer *l = &b->layer[i];
        const bool linked = chain && i > 0;
        if (b->k->prepare(b->backend, &l->desc, &l->op, &err))
            die(l->name, &err);
        l->args.x[0] = linked ? b->layer[i - 1].args.y : take_random(b, l->desc.rows * l->desc.x_stride, 1);
        l->args.y = take(b, l->desc.rows * l->desc.y_stride * sizeof(float));
        l->args.weight =
            take_random(b, l->weights + 1, 1 / sqrtf((float)(l->weights / (l->weight_rows ? l->weight_rows : 1)) + 1));
        l->args.bias = take_random(b, l->biases + 1, 0.1f);
        l->args.dweight = take(b, l->weights * sizeof(float));
        l->args.dbias = take(b, l->biases * sizeof(float));
        l->args.saved = take(b, b->k->saved_bytes(l->op));
        l->args.dy = take_random(b, l->desc.rows * l->desc.y_stride, 1);
        if (linked || !chain)
            l->args.dx[0] = linked ? b->layer[i - 1].args.dy : take(b, l->desc.rows * l->desc.x_stride * sizeof(float));
        if (l->desc.kind == KERNEL_CROSS_ENTROPY) {
            int64_t *targets = take(b, b->rows * sizeof *targets);
            for (size_t r = 0; r < b->rows; r++)
                targets[r] = (int64_t)(r % l->desc.cross_entropy.classes);
            l->args.targets = targets;
            l->args.loss = take(b, sizeof *l->args.loss);
        }
        for (int p = 0; p < PASSES; p++)
            l->samples[p] = take(b, STEPS_MAX * sizeof(float));
        const size_t bytes = b->k->workspace_bytes(l->op);
        workspace = bytes > workspace ? bytes : workspace;
        b->parameters += l->weights + l->biases;
    }
    b->workspace = take(b, workspace);
    for (size_t i = 0; i < b->layers; i++)
        b->layer[i].args.workspace = b->workspace;
}

static double timed(struct bench *b, struct layer *l, enum pass pass)
{
    const int64_t start = tally_now_ns();
    if (pass == FORWARD)
        b->k->forward(l->op, b->stream, &l->args);
    else if (pass == WEIGHT && l->weights)
        b->k->backward_weight(l->op, b->stream, &l->args, 0, l->weight_rows);
    else if (pass == DATA && l->args.dx[0])
        b->k->backward_data(l->op, b->stream, &l->args);
    else
        return 0;
    const double us = 1e-3 * (double)(tally_now_ns() - start);
    l->samples[pass][b->steps] = (float)us;
    return us;
}

static void run_steps(struct bench *b)
{
    const struct kernel_sgd sgd = {.lr = 1e-6f, .momentum = 0.9f};
    float *w = take_random(b, b->parameters, 1), *m = take(b, b->parameters * 4), *g = take_random(b, b->parameters, 1);
    const int64_t end = tally_now_ns() + (int64_t)(b->seconds * 1e9);
    for (int warm = 2; b->steps < STEPS_MAX && (warm > 0 || b->steps < 3 || tally_now_ns() < end);
         b->steps += warm <= 0, warm--) {
        double us = 0;
        for (size_t i = 0; i < b->layers; i++)
            us += timed(b, &b->layer[i], FORWARD);
        for (size_t i = b->layers; i-- > 0;)
            us += timed(b, &b->layer[i], WEIGHT) + timed(b, &b->layer[i], DATA);
        b->step_us[b->steps] = (float)us;
        const int64_t start = tally_now_ns();
        b->k->sgd(b->stream, b->parameters, &sgd, 64, g, NULL, w, m, w, m);
        b->sgd_us[b->steps] = 1e-3f * (float)(tally_now_ns() - start);
    }
    b->k->free(b->backend, w);
    b->k->free(b->backend, m);
    b->k->free(b->backend, g);
}

static int compare(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double typical(float *samples, size_t n)
{
    qsort(samples, n, sizeof *samples, compare);
    return (double)samples[n / 10];
}

static void report(struct bench *b, const char *name)
{
    double gflop = 0;
    printf("%s, %zu rows, %s, %zu steps\n", name, b->rows, b->k->isa(b->backend), b->steps);
    for (size_t i = 0; i < b->layers; i++) {
        struct layer *l = &b->layer[i];
        printf("  %-28s", l->name);
        for (int p = 0; p < PASSES; p++) {
            const double us = typical(l->samples[p], b->steps);
            if (us > 0) {
                printf("  %s %9.2f us", pass_name[p], us);
                if (l->gflop > 0)
                    printf(" %6.1f GF/s", l->gflop / us * 1e6);
                gflop += l->gflop;
            }
        }
        printf("   [%s]\n", b->k->formulation(l->op));
    }
    const double us = typical(b->step_us, b->steps), sgd = typical(b->sgd_us, b->steps);
    printf("  %-28s  %.3f ms, %.1f GF/s, %.0f samples/s", "forward + backward", us / 1e3, gflop / us * 1e6,
           (double)b->rows / us * 1e6);
    printf("; SGD %.3f ms, %.1f GB/s; with it %.0f samples/s\n", sgd / 1e3, 20e-3 * (double)b->parameters / sgd,
           (double)b->rows / (us + sgd) * 1e6);
}

static void build(struct bench *b, const char *model)
{
    bool chain = true;
    if (strcmp(model, "small") == 0) {
        add_linear(b, 10, 20, true);
        add_linear(b, 20, 2, false);
        add_loss(b, 2);
    } else if (strcmp(model, "mlp") == 0) {
        add_linear(b, 784, 512, true);
        add_linear(b, 512, 256, true);
        add_linear(b, 256, 10, false);
        add_loss(b, 10);
    } else if (strcmp(model, "wide") == 0) {
        add_linear(b, 784, 4096, true);
        add_linear(b, 4096, 4096, true);
        add_linear(b, 4096, 10, false);
        add_loss(b, 10);
    } else if (strcmp(model, "cnn") == 0) {
        add_conv(b, 1, 28, 20, 5, 0, true, true);
        add_conv(b, 20, 12, 50, 5, 0, true, true);
        add_linear(b, 800, 500, true);
        add_linear(b, 500, 10, false);
        add_loss(b, 10);
    } else if (strcmp(model, "convs") == 0) {
        chain = false;
        add_conv(b, 64, 56, 64, 3, 1, false, false);
        add_conv(b, 128, 28, 128, 3, 1, false, false);
        add_conv(b, 256, 14, 256, 3, 1, true, false);
        add_conv(b, 256, 14, 512, 1, 0, true, false);
        add_conv(b, 3, 32, 32, 3, 1, true, true);
        add_conv(b, 32, 16, 64, 3, 1, true, true);
    } else {
        die(model, &(struct tally_error){.message = "unknown model, expected small, mlp, wide, cnn or convs"});
    }
    connect(b, chain);
}

static void run_model(const char *isa, const char *model, size_t rows, double seconds)
{
    struct tally_error err;
    struct bench b = {.k = kernels_find("cpu"), .rows = rows, .seconds = seconds};
    if (b.k->open(isa, 0, &b.backend, &err) || b.k->stream_open(b.backend, &b.stream, &err))
        die("open", &err);
    b.step_us = take(&b, STEPS_MAX * sizeof(float));
    b.sgd_us = take(&b, STEPS_MAX * sizeof(float));
    build(&b, model);
    run_steps(&b);
    report(&b, model);
    /* Memory is left to the end of the process: nothing here runs for long. */
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"isa", required_argument, NULL, 'i'},
                                            {"seconds", required_argument, NULL, 's'},
                                            {"rows", required_argument, NULL, 'r'},
                                            {NULL, 0, NULL, 0}};
    static const char *const all[] = {"small", "mlp", "wide", "cnn", "convs"};
    const char *isa = NULL;
    double seconds = 2;
    size_t rows = 64;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == 'i')
            isa = optarg;
        else if (c == 's')
            seconds = strtod(optarg, NULL);
        else if (c == 'r')
            rows = strtoul(optarg, NULL, 10);
        else
            return 2;
    }
    if (optind == argc)
        for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
            run_model(isa, all[i], rows, seconds);
    for (int i = optind; i < argc; i++)
        run_model(isa, argv[i], rows, seconds);
    return 0;
}
