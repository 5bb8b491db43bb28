#include "worker/job_data.h"

#include <inttypes.h>

static tally_status check_shape(const struct dataset_info *info, uint64_t samples, const Tally__V1__DataFacts *facts,
                                const char *key, struct tally_error *err)
{
    bool same = info->input_ndim == facts->n_input_shape;
    for (size_t i = 0; same && i < info->input_ndim; i++)
        same = info->input_shape[i] == facts->input_shape[i];
    if (!same)
        return tally_fail(err, TALLY_EINVAL, "%s: the samples here have another shape than when the job was submitted",
                          key);
    if (info->samples != samples)
        return tally_fail(err, TALLY_EINVAL, "%s: %" PRIu64 " samples here, %" PRIu64 " when the job was submitted",
                          key, info->samples, samples);
    if (info->target != DATASET_VALUES)
        return TALLY_OK;
    same = info->target_ndim == facts->n_target_shape;
    for (size_t i = 0; same && i < info->target_ndim; i++)
        same = info->target_shape[i] == facts->target_shape[i];
    if (!same)
        return tally_fail(err, TALLY_EINVAL, "%s: the targets here have another shape than when the job was submitted",
                          key);
    return TALLY_OK;
}

static tally_status check_classes(const struct model *model, const struct dataset *set, const char *key,
                                  struct tally_error *err)
{
    const Tally__V1__Loss *loss = model->spec->model->loss;
    if (loss->kind_case != TALLY__V1__LOSS__KIND_CROSS_ENTROPY)
        return TALLY_OK;
    tally_status status = dataset_check_classes(set, (int64_t)model->layers[model->layer_count - 1].out.elements,
                                                loss->cross_entropy->ignore_index, err);
    if (status)
        tally_error_prefix(err, "%s", key);
    return status;
}

static tally_status open_set(const struct model *model, const Tally__V1__DataFacts *facts, int part,
                             struct dataset **ret_set, struct tally_error *err)
{
    const char *key = part ? "data.test" : "data.train";
    const Tally__V1__Data *spec = model->spec->data;
    bool mse = model->spec->model->loss->kind_case == TALLY__V1__LOSS__KIND_MSE_LOSS;
    struct dataset *set;
    tally_status status = dataset_open(part ? spec->test : spec->train, spec->normalize,
                                       mse ? DATASET_VALUES : DATASET_CLASSES, model->spec->seed, part, &set, err);
    if (status) {
        tally_error_prefix(err, "%s", key);
        return status;
    }
    status = check_shape(dataset_info(set), part ? facts->test_samples : facts->train_samples, facts, key, err);
    if (!status)
        status = check_classes(model, set, key, err);
    if (status) {
        dataset_close(set);
        return status;
    }
    *ret_set = set;
    return TALLY_OK;
}

tally_status job_data_open(const struct model *model, const Tally__V1__DataFacts *facts, struct job_data *ret_data,
                           struct tally_error *err)
{
    struct job_data data = {0};
    bool has_test = model->spec->data->test != NULL;
    if (has_test != (facts->test_samples > 0))
        return tally_fail(err, TALLY_EINVAL, "data.test: %s, but %" PRIu64 " samples were counted",
                          has_test ? "is given" : "is not given", facts->test_samples);
    tally_status status = open_set(model, facts, 0, &data.train, err);
    if (!status && has_test)
        status = open_set(model, facts, 1, &data.test, err);
    if (status) {
        job_data_close(&data);
        return status;
    }
    *ret_data = data;
    return TALLY_OK;
}

void job_data_close(struct job_data *data)
{
    dataset_close(data->train);
    dataset_close(data->test);
    *data = (struct job_data){0};
}
