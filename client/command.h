#ifndef CLIENT_COMMAND_H
#define CLIENT_COMMAND_H
/*
 * The commands of the CLI: a table (command.c) of names, options, help and functions. Options are data too, so that
 * --help says exactly what is parsed. Results go to stdout; messages, progress and errors to stderr.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"

/* Exit statuses, a part of the contract with scripts. */
enum exit_code {
    EXIT_DONE = 0,
    EXIT_INTERNAL = 1,
    EXIT_USAGE = 2,   /* wrong arguments, or a job file that is refused */
    EXIT_FAILED = 3,  /* the job FAILED */
    EXIT_STOPPED = 4, /* the job was STOPPED */
    EXIT_NOT_FOUND = 5,
    EXIT_UNREACHABLE = 6,
    EXIT_DENIED = 7,
};

enum output_format { OUTPUT_TABLE, OUTPUT_JSON, OUTPUT_YAML, OUTPUT_NAME };

#define ARGUMENTS_SET_MAX 256

/* What any command may be given. Zero or NULL: not given. */
struct arguments {
    const char *operand; /* JOB, or the key of schema */
    const char *out;
    const char *set[ARGUMENTS_SET_MAX];
    size_t set_count;
    uint32_t data, shards;
    enum output_format format;
    bool schedule; /* plan: the pipeline's time chart */
    bool svg;      /* -o svg, of that chart */
    bool quiet;
    bool help;
};

struct command {
    const char *name;
    const char *operand;     /* "JOB", "[KEY]", or NULL; in brackets: may be left out */
    const char *summary;     /* one line */
    const char *options;     /* the letters of option_specs that it takes */
    const char *description; /* paragraphs for --help */
    const char *example;
    int (*run)(const struct arguments *arguments);
};

extern const struct command commands[];
extern const size_t command_count;

int command_run(const struct arguments *arguments);
int command_validate(const struct arguments *arguments);
int command_plan(const struct arguments *arguments);
int command_schema(const struct arguments *arguments);

/* argv without the program and the command. On a usage error writes what is wrong to stderr and returns EXIT_USAGE,
 * else EXIT_DONE. */
int arguments_parse(const struct command *command, int argc, char **argv, struct arguments *ret_arguments);
void command_help(const struct command *command);

/* "tally: <message>" on stderr. Returns the exit status that fits the error's code. */
int report_error(const struct tally_error *err);
int exit_code_of(tally_status status);
#endif
