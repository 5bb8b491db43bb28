/* The flat vector: where each parameter begins, how it is cut into slices, and which shard holds which. */
#include <stdlib.h>

#include "common/limits.h"
#include "model/build.h"

#define ALIGN_FLOATS ((size_t)16)
#define SLICE_MAX_FLOATS ((size_t)TALLY_SLICE_MAX_BYTES / sizeof(float))

static size_t align_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

struct cutter {
    struct model *model;
    size_t capacity;
    bool failed;
};

static void cut(struct cutter *c, size_t offset, size_t count, uint32_t param_begin, uint32_t param_end)
{
    struct model *m = c->model;
    if (m->slice_count == c->capacity) {
        size_t capacity = c->capacity ? 2 * c->capacity : 64;
        struct slice *slices = reallocarray(m->slices, capacity, sizeof *slices);
        if (!slices) {
            c->failed = true;
            return;
        }
        m->slices = slices;
        c->capacity = capacity;
    }
    m->slices[m->slice_count++] = (struct slice){offset, count, param_begin, param_end};
}

/* A parameter larger than a slice: pieces of whole rows, nearly alike. The last one takes the padding behind it, for
 * which its place is kept. */
static void cut_large(struct cutter *c, uint32_t index)
{
    const struct param *p = &c->model->params[index];
    size_t elements = p->shape.elements, total = align_up(elements, ALIGN_FLOATS), row = elements / p->shape.dim[0];
    size_t limit = SLICE_MAX_FLOATS - (total == elements ? 0 : ALIGN_FLOATS),
           piece = limit / ALIGN_FLOATS * ALIGN_FLOATS;
    if (row <= limit) {
        size_t rows = p->shape.dim[0], most = limit / row, pieces = (rows + most - 1) / most;
        size_t each = align_up((rows + pieces - 1) / pieces, 8);
        piece = (each > most ? most : each) * row;
    }
    for (size_t done = 0; done < elements && !c->failed; done += piece) {
        bool last = elements - done <= piece;
        cut(c, p->offset + done, last ? total - done : piece, index, index + 1);
    }
}

static tally_status place_params(struct model *model, struct tally_error *err)
{
    size_t offset = 0;
    for (size_t i = 0; i < model->param_count; i++) {
        model->params[i].offset = offset;
        offset += align_up(model->params[i].shape.elements, ALIGN_FLOATS);
        model->param_elements += model->params[i].shape.elements;
        if (offset > TALLY_ELEMENTS_MAX)
            return tally_fail(err, TALLY_EINVAL, "model: more than %zu parameters", TALLY_ELEMENTS_MAX);
    }
    model->flat_count = offset;
    return TALLY_OK;
}

tally_status slices_build(struct model *model, struct tally_error *err)
{
    struct cutter c = {.model = model};
    tally_status status = place_params(model, err);
    if (status != TALLY_OK)
        return status;
    for (uint32_t i = 0; i < model->param_count && !c.failed;) {
        size_t begin = model->params[i].offset, count = 0;
        uint32_t end = i;
        while (end < model->param_count) {
            const struct param *p = &model->params[end];
            /* Each stage of a pipeline pushes and gets its own slices. */
            if (model->layers[p->layer].segment != model->layers[model->params[i].layer].segment)
                break;
            size_t padded = align_up(p->shape.elements, ALIGN_FLOATS);
            if (p->offset + padded - begin > SLICE_MAX_FLOATS)
                break;
            count = p->offset + padded - begin;
            end++;
        }
        if (end == i) {
            cut_large(&c, i);
            end = i + 1;
        } else {
            cut(&c, begin, count, i, end);
        }
        i = end;
    }
    return c.failed ? tally_fail(err, TALLY_ENOMEM, "out of memory for the model's slices") : TALLY_OK;
}

/* The first slice whose middle lies at or behind `offset`: the cut nearest to it. */
static size_t nearest_cut(const struct model *model, size_t offset)
{
    size_t low = 0, high = model->slice_count;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (model->slices[mid].offset + model->slices[mid].count / 2 < offset)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

void model_shard_slices(const struct model *model, uint32_t shards, uint32_t shard, uint32_t *ret_begin,
                        uint32_t *ret_end)
{
    size_t n = model->slice_count, begin = 0, end = 0;
    /* Each cut is the nearest to its share of the bytes that leaves every shard a slice, as far as there are any. */
    for (uint32_t s = 0; s <= shard; s++) {
        begin = end;
        size_t later = shards - 1 - s, most = n > later ? n - later : 0;
        end = s + 1 == shards ? n
                              : nearest_cut(model, model->flat_count / shards * (s + 1) +
                                                       model->flat_count % shards * (s + 1) / shards);
        if (end > most)
            end = most;
        if (end < begin + 1)
            end = begin + 1 < n ? begin + 1 : n;
    }
    *ret_begin = (uint32_t)begin;
    *ret_end = (uint32_t)end;
}

uint32_t model_slice_shard(const struct model *model, uint32_t shards, uint32_t slice)
{
    uint32_t begin, end, low = 0, high = shards - 1;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        model_shard_slices(model, shards, mid, &begin, &end);
        if (slice < end)
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}
