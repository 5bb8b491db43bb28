#include "server/shard_job.h"

#include <inttypes.h>
#include <stdlib.h>

#include "common/check.h"
#include "model/init.h"
#include "model/model.h"
#include "server/shard_data.h"

static tally_status take_optimizer(const Tally__V1__JobSpec *spec, struct kernel_sgd *ret_sgd, struct tally_error *err)
{
    const Tally__V1__Optimizer *optimizer = spec->train->optimizer;
    if (!optimizer || optimizer->kind_case != TALLY__V1__OPTIMIZER__KIND_SGD)
        return tally_fail(err, TALLY_EUNSUPPORTED, "the job's optimizer is none that this shard knows");
    const Tally__V1__Sgd *sgd = optimizer->sgd;
    *ret_sgd = (struct kernel_sgd){
        .lr = (float)sgd->lr,
        .momentum = (float)sgd->momentum,
        .dampening = sgd->dampening,
        .weight_decay = (float)sgd->weight_decay,
        .nesterov = sgd->nesterov,
        .maximize = sgd->maximize,
    };
    return TALLY_OK;
}

static tally_status take_steps(const Tally__V1__OpenJob *order, struct batches *ret_batches, struct tally_error *err)
{
    const Tally__V1__JobSpec *spec = order->spec;
    if (!spec->data || !spec->train || spec->train->micro_batch_size == 0)
        return tally_fail(err, TALLY_EINVAL, "the order to open it has no complete job spec");
    return batches_init(ret_batches, order->facts->train_samples, spec->train->batch_size,
                        spec->train->micro_batch_size, spec->data->drop_last, spec->train->epochs, spec->train->steps,
                        err);
}

static tally_status open_kernels(struct shard_job *job, struct tally_error *err)
{
    job->kernels = kernels_find("cpu");
    tally_status status = job->kernels->open(NULL, 0, &job->backend, err);
    if (status == TALLY_OK)
        status = job->kernels->stream_open(job->backend, &job->stream, err);
    if (status == TALLY_OK)
        status = shard_sum_new(job->kernels, job->stream, &shard_payload_ops, &job->sum, err);
    return status;
}

static tally_status make_reports(struct shard_job *job, const Tally__V1__OpenJob *order, struct shard *shard,
                                 struct tally_error *err)
{
    for (int i = 0; i < 2; i++) {
        struct shard_report *report = calloc(1, sizeof *report);
        if (!report)
            return tally_fail(err, TALLY_ENOMEM, "out of memory for reports of steps");
        report->shard = shard;
        report->job = job;
        report->job_id = order->job;
        for (size_t r = 0; r < SHARD_REPORT_STEPS; r++) {
            tally__v1__step_record__init(&report->records[r]);
            report->pointers[r] = &report->records[r];
        }
        job->reports[i] = report;
    }
    job->filling = job->reports[0];
    return TALLY_OK;
}

static tally_status make_store(struct shard_job *job, const Tally__V1__OpenJob *order, const struct model *model,
                               struct shard_wake *wake, struct tally_error *err)
{
    struct shard_store_config config = {.job = order->job,
                                        .generation = order->generation,
                                        .first_slice = job->first_slice,
                                        .slice_count = job->slice_count,
                                        .kernels = job->kernels,
                                        .backend = job->backend,
                                        .sum = job->sum,
                                        .gradients = &shard_payload_ops,
                                        .wake = wake};
    tally_status status = take_steps(order, &config.batches, err);
    if (status == TALLY_OK)
        status = take_optimizer(model->spec, &config.sgd, err);
    if (status != TALLY_OK)
        return status;
    job->steps = config.batches.steps;
    struct shard_range *slices = calloc(job->slice_count + 1u, sizeof *slices);
    if (!slices)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for a list of slices");
    for (uint32_t i = 0; i < job->slice_count; i++)
        slices[i] =
            (struct shard_range){model->slices[job->first_slice + i].offset, model->slices[job->first_slice + i].count};
    config.slices = slices;
    status = shard_store_new(&config, &job->store, err);
    free(slices);
    if (status != TALLY_OK)
        return status;
    size_t offset, count;
    float *weights = shard_store_first_weights(job->store, &offset, &count);
    return count > 0 ? init_weights(model, offset, offset + count, weights, err) : TALLY_OK;
}

static tally_status take_stages(struct shard_job *job, const struct model *model, struct tally_error *err)
{
    job->stages = job->workers % model->stage_count == 0 ? model->stage_count : 1;
    job->slice_stage = calloc(job->slice_count + 1u, sizeof *job->slice_stage);
    if (!job->slice_stage)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for a job");
    for (uint32_t i = 0; i < job->slice_count && job->stages > 1; i++)
        job->slice_stage[i] = model->layers[model->params[model->slices[job->first_slice + i].param_begin].layer].stage;
    return TALLY_OK;
}

tally_status shard_job_new(const Tally__V1__OpenJob *order, struct shard *shard, struct shard_wake *wake,
                           struct shard_job **ret_job, struct tally_error *err)
{
    if (!order->spec || !order->facts || order->shard >= order->shards || order->workers == 0)
        return tally_fail(err, TALLY_EINVAL,
                          "the order to open it is incomplete (part %" PRIu32 " of %" PRIu32 ", %" PRIu32 " workers)",
                          order->shard, order->shards, order->workers);
    struct model *model = NULL;
    struct shard_job *job = calloc(1, sizeof *job);
    if (!job)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for a job");
    job->id = order->job;
    job->workers = order->workers;
    tally_status status = model_build(order->spec, order->facts, &model, err);
    if (status != TALLY_OK)
        goto out;
    uint32_t end;
    model_shard_slices(model, order->shards, order->shard, &job->first_slice, &end);
    job->slice_count = end - job->first_slice;
    if ((status = take_stages(job, model, err)) != TALLY_OK)
        goto out;
    job->failure = shard_trip_new(shard, order->job, order->generation);
    if (!job->failure) {
        status = tally_fail(err, TALLY_ENOMEM, "out of memory for a job");
        goto out;
    }
    if ((status = open_kernels(job, err)) != TALLY_OK)
        goto out;
    if ((status = make_store(job, order, model, wake, err)) != TALLY_OK)
        goto out;
    if (job->first_slice == 0 && job->slice_count > 0)
        status = make_reports(job, order, shard, err);
out:
    model_free(model);
    if (status == TALLY_OK)
        *ret_job = job;
    else
        shard_job_free(job);
    return status;
}

void shard_job_free(struct shard_job *job)
{
    if (!job)
        return;
    tally_check(!job->exchanges && !job->fetches && job->reports_out == 0);
    shard_store_free(job->store);
    shard_sum_free(job->sum);
    if (job->stream)
        job->kernels->stream_close(job->stream);
    if (job->backend)
        job->kernels->close(job->backend);
    for (int i = 0; i < 2; i++)
        free(job->reports[i]);
    shard_trip_free(job->failure);
    free(job->slice_stage);
    free(job);
}
