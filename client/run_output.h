#ifndef CLIENT_RUN_OUTPUT_H
#define CLIENT_RUN_OUTPUT_H
/*
 * What a run leaves: DIR/job.yaml, metrics.jsonl, model.safetensors, summary.json, and logs/ of the processes. Events
 * are counted here too: this is where losses, evaluations and speed are known.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "client/command.h"
#include "common/error.h"
#include "proto/jobs.pb-c.h"

struct run_output;

/* dir NULL: runs/NAME-N in the working directory, N the first that is free. An existing folder is used, and what an
 * earlier run left in it is replaced. Writes job.yaml. */
tally_status run_output_open(const char *dir, const Tally__V1__JobSpec *spec, struct run_output **ret_output,
                             struct tally_error *err);
/* Accepts NULL. Metrics are closed; what was written stays. */
void run_output_close(struct run_output *output);

const char *run_output_dir(const struct run_output *output);
const char *run_output_logs(const struct run_output *output);
const char *run_output_weights(const struct run_output *output); /* the path of model.safetensors */

/* Appends to metrics.jsonl and keeps what summary and progress tell. */
tally_status run_output_event(struct run_output *output, const Tally__V1__Event *event, struct tally_error *err);
/* Has the metrics reach the file: errors that buffered writes kept come out here. */
tally_status run_output_flush(struct run_output *output, struct tally_error *err);

/* How many steps the job will have: known once it is submitted. */
void run_output_set_steps(struct run_output *output, uint64_t steps);

/* So far. */
struct run_progress {
    uint64_t step, steps, epoch;
    double loss;
    uint64_t samples;          /* trained on */
    double samples_per_second; /* first step to last, without evaluations; 0: not known yet */
    double recent_per_second;  /* of the last second or so; 0: not known yet */
    bool has_eval;
    double eval_loss, eval_accuracy; /* accuracy below 0: a loss without classes */
    double seconds;                  /* first step to last, evaluations included */
};
void run_output_progress(const struct run_output *output, struct run_progress *ret_progress);

/* Writes summary.json. weights: the model.safetensors is there. job: the last that is known of it; may be NULL. */
tally_status run_output_summary(struct run_output *output, Tally__V1__JobState state, const char *reason,
                                const Tally__V1__Job *job, bool weights, struct tally_error *err);
/* Prints the summary to stdout as the user asked. */
tally_status run_output_print(struct run_output *output, enum output_format format, struct tally_error *err);

const char *job_state_text(Tally__V1__JobState state);
#endif
