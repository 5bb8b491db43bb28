#include "client/run_output.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "common/clock.h"
#include "common/file.h"
#include "common/limits.h"
#include "common/spec_print.h"

#define RECENT_US 1000000

struct run_output {
    char *dir, *logs, *weights;
    char *name;
    FILE *metrics;
    struct run_progress progress;
    int64_t started_unix_ms;
    int64_t first_us, last_us; /* of steps, on the shard's clock */
    int64_t evaluating_us;     /* between two steps with an evaluation between them */
    uint64_t timed_samples;    /* of the steps behind the first, where no evaluation came between */
    bool evaluated;            /* since the last step */
    int64_t recent_us;         /* the window of recent_per_second */
    uint64_t recent_samples;
    json_t *summary;
    char state_text[16];
};

const char *job_state_text(Tally__V1__JobState state)
{
    const ProtobufCEnumValue *value =
        protobuf_c_enum_descriptor_get_value(&tally__v1__job_state__descriptor, (int)state);
    return value ? value->name : "UNKNOWN";
}

/* ---- the folder ---- */

static tally_status next_dir(const char *name, char **ret_dir, struct tally_error *err)
{
    tally_status status = file_make_dirs("runs", 0777, err);
    for (unsigned n = 1; status == TALLY_OK && n < 1000000; n++) {
        char *dir = NULL;
        if (asprintf(&dir, "runs/%s-%u", name, n) < 0)
            return tally_fail(err, TALLY_ENOMEM, "no memory");
        if (mkdir(dir, 0777) == 0) {
            *ret_dir = dir;
            return TALLY_OK;
        }
        if (errno != EEXIST)
            status = tally_fail_errno(err, "%s", dir);
        free(dir);
    }
    return status != TALLY_OK ? status : tally_fail(err, TALLY_EEXIST, "runs/%s-1 to -999999 are all taken", name);
}

static tally_status write_job(const struct run_output *o, const Tally__V1__JobSpec *spec, struct tally_error *err)
{
    char *text = NULL;
    tally_status status = spec_yaml_text(&spec->base, SPEC_PRINT_DEFAULTS, &text, err);
    char *path = path_join(o->dir, "job.yaml");
    if (status == TALLY_OK && !path)
        status = tally_fail(err, TALLY_ENOMEM, "no memory");
    if (status == TALLY_OK)
        status = file_write_atomic(path, text, strlen(text), 0644, err);
    free(path);
    free(text);
    return status;
}

static void remove_old(const struct run_output *o)
{
    static const char *const names[] = {"model.safetensors", "metrics.jsonl", "summary.json"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char *path = path_join(o->dir, names[i]);
        if (path)
            unlink(path); /* if it stays, writing it will say why */
        free(path);
    }
}

/* The results of an earlier run may be what the job starts from: these are not removed. */
static tally_status check_start(const struct run_output *o, const Tally__V1__JobSpec *spec, struct tally_error *err)
{
    const Tally__V1__Init *init = spec->model->init;
    struct stat start, old;
    if (!init || init->kind_case != TALLY__V1__INIT__KIND_SAFETENSORS || stat(init->safetensors->path, &start) != 0 ||
        stat(o->weights, &old) != 0 || start.st_dev != old.st_dev || start.st_ino != old.st_ino)
        return TALLY_OK;
    return tally_fail(err, TALLY_EINVAL,
                      "--out %s: the run would overwrite %s, from which the job starts (model.init), expected another "
                      "folder",
                      o->dir, o->weights);
}

tally_status run_output_open(const char *dir, const Tally__V1__JobSpec *spec, struct run_output **ret_output,
                             struct tally_error *err)
{
    struct run_output *o = calloc(1, sizeof *o);
    if (!o)
        return tally_fail(err, TALLY_ENOMEM, "no memory");
    tally_status status = TALLY_OK;
    o->started_unix_ms = tally_unix_ms();
    o->name = strdup(spec->name);
    if (dir) {
        o->dir = strdup(dir);
        status = file_make_dirs(dir, 0777, err);
    } else {
        status = next_dir(spec->name, &o->dir, err);
    }
    char *metrics = NULL;
    if (status == TALLY_OK) {
        o->logs = path_join(o->dir, "logs");
        o->weights = path_join(o->dir, "model.safetensors");
        metrics = path_join(o->dir, "metrics.jsonl");
        if (!o->name || !o->logs || !o->weights || !metrics)
            status = tally_fail(err, TALLY_ENOMEM, "no memory");
    }
    if (status == TALLY_OK)
        status = check_start(o, spec, err);
    if (status == TALLY_OK) {
        remove_old(o);
        status = file_make_dirs(o->logs, 0777, err);
    }
    if (status == TALLY_OK)
        status = write_job(o, spec, err);
    if (status == TALLY_OK) {
        o->metrics = fopen(metrics, "we");
        if (!o->metrics)
            status = tally_fail_errno(err, "%s", metrics);
    }
    free(metrics);
    if (status != TALLY_OK) {
        run_output_close(o);
        return status;
    }
    *ret_output = o;
    return TALLY_OK;
}

void run_output_close(struct run_output *o)
{
    if (!o)
        return;
    if (o->metrics)
        fclose(o->metrics);
    json_decref(o->summary);
    free(o->dir);
    free(o->logs);
    free(o->weights);
    free(o->name);
    free(o);
}

const char *run_output_dir(const struct run_output *o)
{
    return o->dir;
}

const char *run_output_logs(const struct run_output *o)
{
    return o->logs;
}

const char *run_output_weights(const struct run_output *o)
{
    return o->weights;
}

/* ---- events ---- */

/* A double as JSON that reads back to the same bits; JSON has no NaN or infinity. */
static const char *json_double(double value, char text[32])
{
    if (!isfinite(value))
        return "null";
    snprintf(text, 32, "%.17g", value);
    return text;
}

/* A NaN may have a sign, which nobody wants to see. */
static double printed_loss(double loss)
{
    return isnan(loss) ? (double)NAN : loss;
}

static void count_step(struct run_output *o, const Tally__V1__StepDone *s)
{
    struct run_progress *p = &o->progress;
    if (o->first_us == 0) {
        o->first_us = o->recent_us = s->mono_us;
    } else if (o->evaluated) {
        o->evaluating_us += s->mono_us - o->last_us;
        o->recent_us = s->mono_us;
        o->recent_samples = 0;
    } else {
        o->timed_samples += s->samples;
        o->recent_samples += s->samples;
    }
    o->evaluated = false;
    o->last_us = s->mono_us;
    p->step = s->step;
    p->epoch = s->epoch;
    p->loss = printed_loss(s->loss);
    p->samples += s->samples;
    p->seconds = (double)(o->last_us - o->first_us) * 1e-6;
    double timed = (double)(o->last_us - o->first_us - o->evaluating_us) * 1e-6;
    p->samples_per_second = timed > 0 ? (double)o->timed_samples / timed : 0;
    if (s->mono_us - o->recent_us >= RECENT_US) {
        p->recent_per_second = (double)o->recent_samples * 1e6 / (double)(s->mono_us - o->recent_us);
        o->recent_us = s->mono_us;
        o->recent_samples = 0;
    }
}

static int write_step(struct run_output *o, const Tally__V1__Event *event)
{
    const Tally__V1__StepDone *s = event->step;
    char loss[32];
    char lr[32];
    count_step(o, s);
    return fprintf(o->metrics,
                   "{\"step\":%llu,\"epoch\":%llu,\"loss\":%s,\"samples\":%llu,\"lr\":%s,\"time\":%lld.%03d}\n",
                   (unsigned long long)s->step, (unsigned long long)s->epoch, json_double(s->loss, loss),
                   (unsigned long long)s->samples, json_double(s->lr, lr), (long long)(event->unix_ms / 1000),
                   (int)(event->unix_ms % 1000));
}

static int write_eval(struct run_output *o, const Tally__V1__Event *event)
{
    const Tally__V1__EvalDone *e = event->eval;
    char loss[32];
    char accuracy[32];
    o->evaluated = true;
    o->progress.has_eval = true;
    o->progress.eval_loss = printed_loss(e->loss);
    o->progress.eval_accuracy = e->accuracy;
    int n = fprintf(o->metrics, "{\"step\":%llu,\"epoch\":%llu,\"eval\":{\"loss\":%s", (unsigned long long)e->step,
                    (unsigned long long)e->epoch, json_double(e->loss, loss));
    if (n >= 0 && e->accuracy >= 0)
        n = fprintf(o->metrics, ",\"accuracy\":%s", json_double(e->accuracy, accuracy));
    if (n >= 0)
        n = fprintf(o->metrics, "}}\n");
    return n;
}

tally_status run_output_event(struct run_output *o, const Tally__V1__Event *event, struct tally_error *err)
{
    int n = 0;
    if (event->body_case == TALLY__V1__EVENT__BODY_STEP)
        n = write_step(o, event);
    else if (event->body_case == TALLY__V1__EVENT__BODY_EVAL)
        n = write_eval(o, event);
    return n < 0 ? tally_fail_errno(err, "%s/metrics.jsonl", o->dir) : TALLY_OK;
}

tally_status run_output_flush(struct run_output *o, struct tally_error *err)
{
    return fflush(o->metrics) == 0 ? TALLY_OK : tally_fail_errno(err, "%s/metrics.jsonl", o->dir);
}

void run_output_set_steps(struct run_output *o, uint64_t steps)
{
    o->progress.steps = steps;
}

void run_output_progress(const struct run_output *o, struct run_progress *ret_progress)
{
    *ret_progress = o->progress;
}

/* ---- the summary ---- */

static void set_mesh(json_t *summary, const Tally__V1__Job *job)
{
    const Tally__V1__Gang *gang = job ? job->gang : NULL;
    if (!gang)
        return;
    json_object_set_new(summary, "mesh",
                        json_pack("{s:i, s:i, s:i, s:i}", "data", (int)gang->data, "pipeline", (int)gang->pipeline,
                                  "tensor", (int)gang->tensor, "shards", (int)gang->n_shards));
    json_object_set_new(summary, "isa", json_string(gang->isa));
}

static json_t *number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *make_summary(struct run_output *o, const char *state, const char *reason, const Tally__V1__Job *job,
                            bool weights)
{
    const struct run_progress *p = &o->progress;
    json_t *s = json_object();
    json_object_set_new(s, "name", json_string(o->name));
    json_object_set_new(s, "state", json_string(state));
    if (reason && reason[0])
        json_object_set_new(s, "reason", json_string(reason));
    json_object_set_new(s, "steps", json_integer((json_int_t)p->step));
    json_object_set_new(s, "epoch", json_integer((json_int_t)p->epoch));
    json_object_set_new(s, "samples", json_integer((json_int_t)p->samples));
    json_object_set_new(s, "seconds", json_real(p->seconds));
    json_object_set_new(s, "samples_per_second",
                        p->samples_per_second > 0 ? json_real(p->samples_per_second) : json_null());
    json_object_set_new(s, "total_seconds", json_real((double)(tally_unix_ms() - o->started_unix_ms) * 1e-3));
    if (p->step > 0)
        json_object_set_new(s, "loss", number(p->loss));
    if (p->has_eval) {
        json_t *eval = json_object();
        json_object_set_new(eval, "loss", number(p->eval_loss));
        if (p->eval_accuracy >= 0)
            json_object_set_new(eval, "accuracy", json_real(p->eval_accuracy));
        json_object_set_new(s, "eval", eval);
    }
    if (weights) {
        json_object_set_new(s, "weights", json_string(o->weights));
        json_object_set_new(s, "sha256", json_string(job ? job->weights_sha256 : ""));
    }
    set_mesh(s, job);
    return s;
}

tally_status run_output_summary(struct run_output *o, Tally__V1__JobState state, const char *reason,
                                const Tally__V1__Job *job, bool weights, struct tally_error *err)
{
    snprintf(o->state_text, sizeof o->state_text, "%s", job_state_text(state));
    json_decref(o->summary);
    o->summary = make_summary(o, o->state_text, reason, job, weights);
    char *text =
        o->summary ? json_dumps(o->summary, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(17)) : NULL;
    char *path = path_join(o->dir, "summary.json");
    char *line = NULL;
    tally_status status = TALLY_OK;
    if (!text || !path || asprintf(&line, "%s\n", text) < 0)
        status = tally_fail(err, TALLY_ENOMEM, "no memory for the summary");
    if (status == TALLY_OK)
        status = file_write_atomic(path, line, strlen(line), 0644, err);
    free(line);
    free(path);
    free(text);
    return status;
}

static void print_table(const struct run_output *o)
{
    const struct run_progress *p = &o->progress;
    printf("job           %s %s\n", o->name, o->state_text);
    printf("steps         %llu of %llu in %.1f s", (unsigned long long)p->step,
           (unsigned long long)(p->steps ? p->steps : p->step), p->seconds);
    if (p->samples_per_second > 0)
        printf(", %.0f samples/s", p->samples_per_second);
    printf("\n");
    if (p->step > 0)
        printf("training loss %.6g\n", p->loss);
    if (p->has_eval) {
        printf("test loss     %.6g\n", p->eval_loss);
        if (p->eval_accuracy >= 0)
            printf("test accuracy %.4f\n", p->eval_accuracy);
    }
    if (json_object_get(o->summary, "weights"))
        printf("weights       %s\n", o->weights);
    printf("results       %s\n", o->dir);
}

static void print_yaml(const json_t *summary)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)summary, key, value)
    {
        char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(17));
        printf("%s: %s\n", key, text ? text : "");
        free(text);
    }
}

tally_status run_output_print(struct run_output *o, enum output_format format, struct tally_error *err)
{
    char *text = NULL;
    switch (format) {
    case OUTPUT_TABLE:
        print_table(o);
        break;
    case OUTPUT_NAME:
        printf("%s\n", o->dir);
        break;
    case OUTPUT_YAML:
        print_yaml(o->summary); /* JSON's values are YAML's */
        break;
    case OUTPUT_JSON:
        text = json_dumps(o->summary, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(17));
        printf("%s\n", text ? text : "{}");
        free(text);
        break;
    }
    return fflush(stdout) == 0 ? TALLY_OK : tally_fail_errno(err, "stdout");
}
