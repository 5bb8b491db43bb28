#include "model/dataset.h"

#include <inttypes.h>
#include <stdlib.h>

#include "common/check.h"
#include "common/limits.h"
#include "model/dataset_array.h"
#include "model/dataset_csv.h"
#include "model/dataset_normalize.h"
#include "model/dataset_synthetic.h"

#define CLASSES_CHUNK 512 /* read at a time, when only they are looked at */

struct dataset {
    struct dataset_info info;
    struct data_array inputs, targets; /* targets: values */
    int64_t *classes;                  /* (samples) */
    struct synthetic *synthetic;       /* instead of the arrays; NULL: a file */
    struct normalizer normalizer;
};

/* What dataset_open and dataset_probe have in common. */
struct request {
    const Tally__V1__Source *source;
    enum dataset_target want;
    uint64_t seed;
    int part;
    bool probe;
    struct tally_error *err;
};

static tally_status check_path(const char *path, struct tally_error *err)
{
    if (path && path[0] == '/')
        return TALLY_OK;
    return tally_fail(err, TALLY_EINVAL, "%s: a data file's path must be absolute here",
                      path && path[0] ? path : "(empty)");
}

static tally_status make_wish(const struct request *q, bool has_limit, uint64_t limit, struct data_wish *ret_wish)
{
    if (has_limit && limit == 0)
        return tally_fail(q->err, TALLY_EINVAL, "limit is 0, expected at least 1");
    *ret_wish = (struct data_wish){.limit = has_limit ? limit : 0, .probe = q->probe};
    return TALLY_OK;
}

/* ---- shapes ---- */

/* A sample is what is left without the first dimension. as_image: two dimensions are one channel. */
static tally_status set_input_shape(struct dataset_info *info, const struct data_array *inputs, const char *name,
                                    bool as_image, struct tally_error *err)
{
    char shape[DATA_SHAPE_TEXT_BYTES];
    if (inputs->ndim < 2)
        return tally_fail(err, TALLY_EINVAL,
                          "%s: holds one number a sample, its shape is %s; expected inputs of (samples, features), "
                          "(samples, height, width) or (samples, channels, height, width)",
                          name, data_shape_text(inputs, shape));
    bool image = as_image && inputs->ndim == 3;
    info->input_ndim = 0;
    if (image)
        info->input_shape[info->input_ndim++] = 1;
    for (size_t i = 1; i < inputs->ndim; i++)
        info->input_shape[info->input_ndim++] = inputs->dim[i];
    info->input_elements = inputs->sample_elements;
    return TALLY_OK;
}

static tally_status set_target_shape(struct dataset_info *info, const struct data_array *targets, const char *name,
                                     enum dataset_target want, struct tally_error *err)
{
    char shape[DATA_SHAPE_TEXT_BYTES];
    info->target = want;
    info->target_elements = targets->sample_elements;
    if (want == DATASET_VALUES) {
        /* One number a sample is a vector of one. */
        info->target_shape[0] = 1;
        info->target_ndim = targets->ndim > 1 ? targets->ndim - 1 : 1;
        for (size_t i = 1; i < targets->ndim; i++)
            info->target_shape[i - 1] = targets->dim[i];
        return TALLY_OK;
    }
    if (targets->sample_elements != 1)
        return tally_fail(err, TALLY_EINVAL, "%s: its shape is %s, expected one class index a sample", name,
                          data_shape_text(targets, shape));
    if (data_type_is_float(targets->type))
        return tally_fail(err, TALLY_EINVAL, "%s: its elements are %s, expected class indices, integers", name,
                          data_type_text(targets->type));
    return TALLY_OK;
}

/* The pair is one set: sizes, shapes, and the class indices read once. Takes over the arrays, on failure too. */
static tally_status join(const struct request *q, struct dataset *set, const char *inputs_name,
                         const char *targets_name, bool as_image)
{
    struct dataset_info *info = &set->info;
    info->samples = set->inputs.samples;
    tally_status status = set_input_shape(info, &set->inputs, inputs_name, as_image, q->err);
    if (status == TALLY_OK)
        status = set_target_shape(info, &set->targets, targets_name, q->want, q->err);
    if (status == TALLY_OK && set->inputs.dim[0] != set->targets.dim[0])
        status = tally_fail(q->err, TALLY_EINVAL,
                            "%s holds %" PRIu64 " samples and %s %" PRIu64 " targets, expected as many", inputs_name,
                            set->inputs.dim[0], targets_name, set->targets.dim[0]);
    if (status != TALLY_OK || q->probe || q->want == DATASET_VALUES)
        return status;
    set->classes = malloc(info->samples * sizeof(int64_t));
    if (!set->classes)
        return tally_fail(q->err, TALLY_ENOMEM, "%s: no memory for %" PRIu64 " class indices", targets_name,
                          info->samples);
    data_to_i64(&set->targets, set->targets.data, set->classes, info->samples);
    data_array_close(&set->targets);
    info->class_min = info->class_max = set->classes[0];
    for (size_t i = 1; i < info->samples; i++) {
        info->class_min = set->classes[i] < info->class_min ? set->classes[i] : info->class_min;
        info->class_max = set->classes[i] > info->class_max ? set->classes[i] : info->class_max;
    }
    return TALLY_OK;
}

/* ---- sources ---- */

static tally_status load_pair(const struct request *q, struct dataset *set, const char *inputs, const char *targets,
                              struct data_wish wish, data_parse *parse, bool as_image)
{
    tally_status status = check_path(inputs, q->err);
    if (status == TALLY_OK)
        status = check_path(targets, q->err);
    /* The targets first: they are the smaller file, and so the quicker refusal. */
    if (status == TALLY_OK)
        status = data_array_open(targets, &wish, parse, &set->targets, q->err);
    if (status == TALLY_OK)
        status = data_array_open(inputs, &wish, parse, &set->inputs, q->err);
    return status == TALLY_OK ? join(q, set, inputs, targets, as_image) : status;
}

static tally_status load_idx(const struct request *q, struct dataset *set)
{
    const Tally__V1__Idx *idx = q->source->idx;
    struct data_wish wish;
    if (q->want == DATASET_VALUES)
        return tally_fail(q->err, TALLY_EINVAL,
                          "%s: an idx source's targets are class indices, but the loss needs values: use npy or csv",
                          idx->targets);
    tally_status status = make_wish(q, idx->has_limit, idx->limit, &wish);
    return status == TALLY_OK ? load_pair(q, set, idx->inputs, idx->targets, wish, data_idx_parse, true) : status;
}

static tally_status load_npy(const struct request *q, struct dataset *set)
{
    const Tally__V1__Npy *npy = q->source->npy;
    struct data_wish wish;
    tally_status status = make_wish(q, npy->has_limit, npy->limit, &wish);
    return status == TALLY_OK ? load_pair(q, set, npy->inputs, npy->targets, wish, data_npy_parse, false) : status;
}

static tally_status load_csv(const struct request *q, struct dataset *set)
{
    const Tally__V1__Csv *csv = q->source->csv;
    struct csv_wish wish = {.target = csv->target, .header = csv->header, .classes = q->want == DATASET_CLASSES};
    tally_status status = make_wish(q, csv->has_limit, csv->limit, &wish.wish);
    if (status == TALLY_OK)
        status = check_path(csv->path, q->err);
    if (status == TALLY_OK && !csv->target)
        status = tally_fail(q->err, TALLY_EINVAL, "%s: which column is the target is not given", csv->path);
    struct file_map map = {0};
    if (status == TALLY_OK)
        status = file_map_open(csv->path, &map, q->err);
    if (status == TALLY_OK)
        status = data_csv_parse(csv->path, map.data, map.bytes, &wish, &set->inputs, &set->targets, q->err);
    file_map_close(&map);
    return status == TALLY_OK ? join(q, set, csv->path, csv->path, false) : status;
}

static tally_status set_dims(const uint32_t *dims, size_t n, const char *what, size_t *ret_ndim, size_t ret_shape[3],
                             size_t *ret_elements, struct tally_error *err)
{
    size_t elements = 1;
    if (n < 1 || n > 3)
        return tally_fail(err, TALLY_EINVAL, "synthetic.%s has %zu dimensions, expected 1 to 3", what, n);
    for (size_t i = 0; i < n; i++) {
        if (dims[i] == 0 || __builtin_mul_overflow(elements, dims[i], &elements) || elements > TALLY_ELEMENTS_MAX)
            return tally_fail(err, TALLY_EINVAL, "synthetic.%s has the dimension %u, expected 1 to %zu elements in all",
                              what, dims[i], TALLY_ELEMENTS_MAX);
        ret_shape[i] = dims[i];
    }
    *ret_ndim = n;
    *ret_elements = elements;
    return TALLY_OK;
}

static tally_status load_synthetic(const struct request *q, struct dataset *set)
{
    const Tally__V1__Synthetic *spec = q->source->synthetic;
    struct dataset_info *info = &set->info;
    if (spec->samples == 0 || spec->samples > UINT32_MAX)
        return tally_fail(q->err, TALLY_EINVAL, "synthetic.samples is %" PRIu64 ", expected 1 to %" PRIu32,
                          spec->samples, UINT32_MAX);
    info->samples = spec->samples;
    info->target = q->want;
    tally_status status = set_dims(spec->shape, spec->n_shape, "shape", &info->input_ndim, info->input_shape,
                                   &info->input_elements, q->err);
    if (status != TALLY_OK)
        return status;
    if (q->want == DATASET_VALUES) {
        if (spec->n_target_shape == 0)
            return tally_fail(q->err, TALLY_EINVAL, "synthetic.target_shape is not given, and the loss needs values");
        status = set_dims(spec->target_shape, spec->n_target_shape, "target_shape", &info->target_ndim,
                          info->target_shape, &info->target_elements, q->err);
    } else {
        if (spec->classes == 0)
            return tally_fail(q->err, TALLY_EINVAL, "synthetic.classes is not given, and the loss needs classes");
        info->target_elements = 1;
        info->class_max = (int64_t)(spec->classes < spec->samples ? spec->classes : spec->samples) - 1;
    }
    if (status != TALLY_OK || q->probe)
        return status;
    return synthetic_open(spec, info, q->seed, q->part, &set->synthetic, q->err);
}

static tally_status load(const struct request *q, struct dataset *set)
{
    switch (q->source->kind_case) {
    case TALLY__V1__SOURCE__KIND_IDX:
        return load_idx(q, set);
    case TALLY__V1__SOURCE__KIND_NPY:
        return load_npy(q, set);
    case TALLY__V1__SOURCE__KIND_CSV:
        return load_csv(q, set);
    case TALLY__V1__SOURCE__KIND_SYNTHETIC:
        return load_synthetic(q, set);
    default:
        return tally_fail(q->err, TALLY_EINVAL, "no data source is given, expected idx, npy, csv or synthetic");
    }
}

static void release(struct dataset *set)
{
    data_array_close(&set->inputs);
    data_array_close(&set->targets);
    free(set->classes);
    synthetic_close(set->synthetic);
    normalizer_free(&set->normalizer);
}

/* ---- the interface ---- */

tally_status dataset_open(const Tally__V1__Source *source, const Tally__V1__Normalize *normalize,
                          enum dataset_target want, uint64_t seed, int part, struct dataset **ret_set,
                          struct tally_error *err)
{
    struct request q = {.source = source, .want = want, .seed = seed, .part = part, .err = err};
    struct dataset *set = calloc(1, sizeof(*set));
    if (!set)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a data set");
    tally_status status = load(&q, set);
    if (status == TALLY_OK)
        status = normalizer_init(&set->normalizer, normalize, &set->info,
                                 !set->synthetic && set->inputs.type == DATA_U8, err);
    if (status != TALLY_OK) {
        dataset_close(set);
        return status;
    }
    *ret_set = set;
    return TALLY_OK;
}

void dataset_close(struct dataset *set)
{
    if (!set)
        return;
    release(set);
    free(set);
}

const struct dataset_info *dataset_info(const struct dataset *set)
{
    return &set->info;
}

tally_status dataset_probe(const Tally__V1__Source *source, enum dataset_target want, struct dataset_info *ret_info,
                           struct tally_error *err)
{
    struct request q = {.source = source, .want = want, .probe = true, .err = err};
    struct dataset set = {0};
    tally_status status = load(&q, &set);
    if (status == TALLY_OK)
        *ret_info = set.info;
    release(&set);
    return status;
}

/* targets: of samples first, first + 1, ... */
static tally_status check_classes(const int64_t *targets, size_t count, uint64_t first, int64_t classes, int64_t ignore,
                                  struct tally_error *err)
{
    for (size_t i = 0; i < count; i++)
        if ((targets[i] < 0 || targets[i] >= classes) && targets[i] != ignore)
            return tally_fail(err, TALLY_EINVAL,
                              "the target of sample %" PRIu64 " is %" PRId64
                              ", but the model has classes 0 to %" PRId64,
                              first + i, targets[i], classes - 1);
    return TALLY_OK;
}

tally_status dataset_check_classes(const struct dataset *set, int64_t classes, int64_t ignore, struct tally_error *err)
{
    if (!set->classes || (set->info.class_min >= 0 && set->info.class_max < classes))
        return TALLY_OK;
    return check_classes(set->classes, set->info.samples, 0, classes, ignore, err);
}

/* Of a file of targets alone. */
static tally_status probe_classes_file(const char *path, uint64_t limit, data_parse *parse, int64_t classes,
                                       int64_t ignore, struct tally_error *err)
{
    struct data_wish wish = {.limit = limit};
    struct data_array targets = {0};
    int64_t some[CLASSES_CHUNK];
    tally_status status = data_array_open(path, &wish, parse, &targets, err);
    for (uint64_t first = 0; status == TALLY_OK && first < targets.samples; first += CLASSES_CHUNK) {
        size_t count = targets.samples - first < CLASSES_CHUNK ? targets.samples - first : CLASSES_CHUNK;
        data_to_i64(&targets, targets.data + first * targets.sample_bytes, some, count);
        status = check_classes(some, count, first, classes, ignore, err);
    }
    data_array_close(&targets);
    return status;
}

tally_status dataset_probe_classes(const Tally__V1__Source *source, int64_t classes, int64_t ignore,
                                   struct tally_error *err)
{
    struct dataset *set = NULL;
    const Tally__V1__Idx *idx = source->idx;
    const Tally__V1__Npy *npy = source->npy;
    switch (source->kind_case) {
    case TALLY__V1__SOURCE__KIND_IDX:
        return probe_classes_file(idx->targets, idx->has_limit ? idx->limit : 0, data_idx_parse, classes, ignore, err);
    case TALLY__V1__SOURCE__KIND_NPY:
        return probe_classes_file(npy->targets, npy->has_limit ? npy->limit : 0, data_npy_parse, classes, ignore, err);
    case TALLY__V1__SOURCE__KIND_CSV: {
        tally_status status = dataset_open(source, NULL, DATASET_CLASSES, 0, 0, &set, err);
        if (status == TALLY_OK)
            status = dataset_check_classes(set, classes, ignore, err);
        dataset_close(set);
        return status;
    }
    default: /* synthetic: as many as it says */
        return TALLY_OK;
    }
}

static void read_synthetic(const struct dataset *set, uint32_t index, float *x, void *targets, size_t row)
{
    const struct synthetic *s = set->synthetic;
    synthetic_input(s, index, x);
    if (set->info.target == DATASET_CLASSES)
        ((int64_t *)targets)[row] = synthetic_class(s, index);
    else
        synthetic_values(s, index, x, (float *)targets + row * set->info.target_elements);
    normalizer_floats(&set->normalizer, x);
}

static void read_file(const struct dataset *set, uint32_t index, float *x, void *targets, size_t row)
{
    const unsigned char *input = set->inputs.data + (size_t)index * set->inputs.sample_bytes;
    if (set->normalizer.table) {
        normalizer_bytes(&set->normalizer, input, x);
    } else {
        data_to_f32(&set->inputs, input, x, set->inputs.sample_elements);
        normalizer_floats(&set->normalizer, x);
    }
    if (set->classes)
        ((int64_t *)targets)[row] = set->classes[index];
    else
        data_to_f32(&set->targets, set->targets.data + (size_t)index * set->targets.sample_bytes,
                    (float *)targets + row * set->info.target_elements, set->info.target_elements);
}

void dataset_read(const struct dataset *set, const uint32_t *indices, size_t count, float *x, size_t stride,
                  void *targets)
{
    for (size_t i = 0; i < count; i++) {
        tally_check(indices[i] < set->info.samples);
        if (set->synthetic)
            read_synthetic(set, indices[i], x + i * stride, targets, i);
        else
            read_file(set, indices[i], x + i * stride, targets, i);
    }
}
