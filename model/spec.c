/* job_file_load: read (common/spec_file.h), check (spec_check.c, spec_data.c, model.c), complete. */
#include "model/spec.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/file.h"
#include "common/limits.h"
#include "model/build.h"
#include "model/spec_build.h"

#define DEFAULT_NAME_MAX 64

struct job_file {
    struct spec_file *file; /* positions; NULL once loaded */
    char *folder;           /* of the job file; NULL: the working directory */
    Tally__V1__JobSpec *spec;
    Tally__V1__DataFacts *facts;
    struct model *model;
};

static tally_status out_of_memory(struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "out of memory for the job's spec");
}

/* ---- reading ---- */

static tally_status read_stdin(struct spec_file **ret_file, struct tally_error *err)
{
    char *text = malloc(TALLY_JOB_FILE_MAX_BYTES + 1);
    if (!text)
        return out_of_memory(err);
    size_t bytes = fread(text, 1, TALLY_JOB_FILE_MAX_BYTES + 1, stdin);
    tally_status status;
    if (ferror(stdin))
        status = tally_fail_errno(err, "reading the job from standard input");
    else if (bytes > TALLY_JOB_FILE_MAX_BYTES)
        status = tally_fail(err, TALLY_EINVAL, "standard input: a job of more than %u bytes", TALLY_JOB_FILE_MAX_BYTES);
    else
        status = spec_open_text("standard input", text, bytes, ret_file, err);
    free(text);
    return status;
}

static tally_status set_number(struct spec_file *file, const char *key, uint32_t value, struct tally_error *err)
{
    char text[64];
    if (value == 0)
        return TALLY_OK;
    snprintf(text, sizeof text, "%s=%u", key, value);
    return spec_set(file, text, err);
}

static tally_status read_spec(struct job_file *job, const char *path, const struct job_overrides *overrides,
                              struct tally_error *err)
{
    bool from_stdin = strcmp(path, "-") == 0;
    ProtobufCMessage *msg = NULL;
    tally_status status = from_stdin ? read_stdin(&job->file, err) : spec_open(path, &job->file, err);
    if (status == TALLY_OK && !from_stdin && !(job->folder = path_dirname(path)))
        status = out_of_memory(err);
    for (size_t i = 0; overrides && i < overrides->set_count && status == TALLY_OK; i++)
        status = spec_set(job->file, overrides->set[i], err);
    if (status == TALLY_OK && overrides)
        status = set_number(job->file, "parallel.data", overrides->data, err);
    if (status == TALLY_OK && overrides)
        status = set_number(job->file, "parallel.shards", overrides->shards, err);
    if (status == TALLY_OK)
        status = spec_read(job->file, &tally__v1__job_spec__descriptor, &msg, err);
    if (status == TALLY_OK)
        job->spec = (Tally__V1__JobSpec *)msg;
    return status;
}

/* ---- completing ---- */

/* The file's name without its extension, with what a name may not hold as '-'. */
static tally_status name_job(Tally__V1__JobSpec *spec, const char *path, struct tally_error *err)
{
    char name[DEFAULT_NAME_MAX + 1];
    if (spec->name)
        return TALLY_OK;
    snprintf(name, sizeof name, "%s", path_basename(path));
    char *dot = strrchr(name, '.');
    if (dot && dot != name)
        *dot = '\0';
    size_t kept = 0;
    for (char *c = name; *c; c++) {
        bool good =
            (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || (*c >= '0' && *c <= '9') || *c == '_' || *c == '-';
        kept += good;
        if (!good)
            *c = '-';
    }
    spec->name = strdup(kept > 0 && strcmp(name, "-") != 0 ? name : "job");
    return spec->name ? TALLY_OK : out_of_memory(err);
}

static tally_status complete_parallel(Tally__V1__JobSpec *spec, struct tally_error *err)
{
    if (!spec->parallel) {
        spec->parallel = malloc(sizeof *spec->parallel);
        if (!spec->parallel)
            return out_of_memory(err);
        tally__v1__parallel__init(spec->parallel);
    }
    uint32_t replicas = spec_replicas(spec);
    if (!spec->parallel->data) {
        spec->parallel->data = malloc(sizeof *spec->parallel->data);
        if (!spec->parallel->data)
            return out_of_memory(err);
        tally__v1__replicas__init(spec->parallel->data);
    }
    spec->parallel->data->has_count = 1;
    spec->parallel->data->count = replicas;
    return TALLY_OK;
}

/* Sets what depends on other fields. After this the spec says the same and every position in the file is void. */
static tally_status complete(Tally__V1__JobSpec *spec, const struct model *model, struct tally_error *err)
{
    spec->train->micro_batch_size = spec_micro_batch(spec);
    spec->train->has_micro_batch_size = 1;
    tally_status status = complete_parallel(spec, err);
    if (status == TALLY_OK)
        status = model_complete_layers(model, spec->model, err);
    if (status == TALLY_OK)
        status = spec_fill_defaults(&spec->base, err);
    return status;
}

/* ---- checking ---- */

static tally_status check_with_model(Tally__V1__JobSpec *spec, const Tally__V1__DataFacts *facts,
                                     const struct spec_file *file, bool local, struct tally_error *err)
{
    struct model *model = NULL;
    tally_status status = model_build_at(spec, facts, file, &model, err);
    if (status == TALLY_OK)
        status = spec_check_facts(spec, facts, model, file, err);
    if (status == TALLY_OK && local)
        status = spec_check_targets(spec, model, file, err);
    if (status == TALLY_OK && local)
        status = spec_check_init(spec, model, file, err);
    if (status == TALLY_OK)
        status = complete(spec, model, err);
    model_free(model);
    return status;
}

tally_status job_file_load(const char *path, const struct job_overrides *overrides, struct job_file **ret_job,
                           struct tally_error *err)
{
    struct job_file *job = calloc(1, sizeof *job);
    if (!job)
        return out_of_memory(err);
    tally_status status = read_spec(job, path, overrides, err);
    if (status == TALLY_OK)
        status = name_job(job->spec, path, err);
    if (status == TALLY_OK)
        status = spec_check_train(job->spec, job->file, err);
    if (status == TALLY_OK)
        status = spec_check_parallel(job->spec, job->file, err);
    if (status == TALLY_OK)
        status = spec_resolve_paths(job->spec, job->folder, job->file, err);
    if (status == TALLY_OK)
        status = spec_probe(job->spec, job->file, &job->facts, err);
    if (status == TALLY_OK)
        status = check_with_model(job->spec, job->facts, job->file, true, err);
    spec_close(job->file);
    job->file = NULL;
    /* Once more, of the complete spec. */
    if (status == TALLY_OK)
        status = model_build(job->spec, job->facts, &job->model, err);
    if (status == TALLY_OK)
        *ret_job = job;
    else
        job_file_free(job);
    return status;
}

void job_file_free(struct job_file *job)
{
    if (!job)
        return;
    spec_close(job->file);
    free(job->folder);
    model_free(job->model);
    if (job->facts)
        tally__v1__data_facts__free_unpacked(job->facts, NULL);
    if (job->spec)
        tally__v1__job_spec__free_unpacked(job->spec, NULL);
    free(job);
}

const Tally__V1__JobSpec *job_file_spec(const struct job_file *job)
{
    return job->spec;
}

const Tally__V1__DataFacts *job_file_facts(const struct job_file *job)
{
    return job->facts;
}

const struct model *job_file_model(const struct job_file *job)
{
    return job->model;
}

tally_status job_spec_check(Tally__V1__JobSpec *spec, const Tally__V1__DataFacts *facts, struct tally_error *err)
{
    struct spec_file *file = NULL;
    tally_status status = spec_check_message("job", &spec->base, &file, err);
    if (status == TALLY_OK)
        status = name_job(spec, "job", err);
    if (status == TALLY_OK)
        status = spec_check_train(spec, file, err);
    if (status == TALLY_OK)
        status = spec_check_parallel(spec, file, err);
    if (status == TALLY_OK)
        status = spec_check_paths(spec, file, err);
    if (status == TALLY_OK)
        status = check_with_model(spec, facts, file, false, err);
    spec_close(file);
    return status;
}
