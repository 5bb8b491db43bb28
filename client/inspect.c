/* validate, plan and schema: what looks at a job file and runs nothing. */
#include <stdio.h>
#include <stdlib.h>

#include "client/command.h"
#include "common/spec_file.h"
#include "common/spec_print.h"
#include "common/spec_schema.h"
#include "model/describe.h"
#include "model/spec.h"

static int load(const struct arguments *arguments, struct job_file **ret_job)
{
    struct tally_error err = {0};
    struct job_overrides overrides = {
        .set = arguments->set, .set_count = arguments->set_count, .data = arguments->data, .shards = arguments->shards};
    if (job_file_load(arguments->operand, &overrides, ret_job, &err) == TALLY_OK)
        return EXIT_DONE;
    fprintf(stderr, "tally: %s\n", err.message);
    return EXIT_USAGE;
}

static int end(tally_status status, const struct tally_error *err)
{
    return status == TALLY_OK ? EXIT_DONE : report_error(err);
}

int command_validate(const struct arguments *arguments)
{
    struct tally_error err = {0};
    struct job_file *job = NULL;
    int code = load(arguments, &job);
    if (code != EXIT_DONE)
        return code;
    const Tally__V1__JobSpec *spec = job_file_spec(job);
    tally_status status = TALLY_OK;
    switch (arguments->format) {
    case OUTPUT_TABLE:
        printf("%s: ok\n", arguments->operand);
        break;
    case OUTPUT_NAME:
        printf("%s\n", spec->name);
        break;
    case OUTPUT_YAML:
        status = spec_print_yaml(stdout, &spec->base, SPEC_PRINT_DEFAULTS, &err);
        break;
    case OUTPUT_JSON:
        status = spec_print_json(stdout, &spec->base, SPEC_PRINT_DEFAULTS, &err);
        break;
    }
    job_file_free(job);
    return end(status, &err);
}

int command_schema(const struct arguments *arguments)
{
    struct tally_error err = {0};
    const ProtobufCMessageDescriptor *type = &tally__v1__job_spec__descriptor;
    tally_status status = arguments->format == OUTPUT_JSON || arguments->format == OUTPUT_YAML
                              ? spec_schema_json(stdout, type, arguments->operand, &err)
                              : spec_schema_print(stdout, type, arguments->operand, &err);
    return end(status, &err);
}

static void print_json(json_t *value)
{
    char *text = json_dumps(value, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(17));
    printf("%s\n", text ? text : "{}");
    free(text);
}

int command_plan(const struct arguments *arguments)
{
    struct tally_error err = {0};
    struct job_file *job = NULL;
    struct describe_session *session = NULL;
    const struct plan *const *plans = NULL;
    int code = load(arguments, &job);
    if (code != EXIT_DONE)
        return code;
    tally_status status = describe_open(job_file_model(job), job_file_facts(job), NULL, NULL, &session, &plans, &err);
    if (status == TALLY_OK && arguments->schedule) {
        status = describe_schedule(stdout, plans, arguments->svg, &err);
    } else if (status == TALLY_OK &&
               (arguments->format == OUTPUT_JSON || arguments->format == OUTPUT_YAML)) { /* JSON is YAML */
        json_t *value = NULL;
        status = describe_plan_json(plans, &value, &err);
        if (status == TALLY_OK)
            print_json(value);
        json_decref(value);
    } else if (status == TALLY_OK) {
        status = describe_plan(stdout, plans, &err);
    }
    describe_close(session);
    job_file_free(job);
    return end(status, &err);
}
