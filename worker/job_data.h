#ifndef WORKER_JOB_DATA_H
#define WORKER_JOB_DATA_H
/* A job's data sets on this machine, checked against what the job was submitted with. */
#include "model/dataset.h"
#include "model/model.h"

struct job_data {
    struct dataset *train;
    struct dataset *test; /* NULL: none */
};

/*
 * TALLY_EINVAL: the data is not what the facts say (it differs from what the client saw), or a class target is neither
 * one of the model's classes nor ignore_index: named with its sample. And dataset_open's errors, with "data.train" or
 * "data.test" before them.
 */
tally_status job_data_open(const struct model *model, const Tally__V1__DataFacts *facts, struct job_data *ret_data,
                           struct tally_error *err);
void job_data_close(struct job_data *data);
#endif
