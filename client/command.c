#include "client/command.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/spec_file.h"

struct option_spec {
    char letter; /* also how command.options names it; upper case letters have no short form */
    const char *name;
    const char *value; /* NULL: takes none */
    const char *help;
};

static const struct option_spec option_specs[] = {
    {'D', "data", "N", "model replicas (workers), instead of parallel.data"},
    {'M', "shards", "M", "parameter-server shards, instead of parallel.shards"},
    {'S', "set", "KEY.PATH=VALUE", "set a field of the job file; may be repeated"},
    {'O', "out", "DIR", "where results go (default: runs/NAME-N)"},
    {'C', "schedule", NULL, "draw the pipeline's schedule as a time chart (with -o svg as a picture)"},
    {'o', "output", "FORMAT", "table, json, yaml or name"},
    {'q', "quiet", NULL, "no progress"},
    {'h', "help", NULL, "show this help"},
};
#define OPTION_COUNT (sizeof option_specs / sizeof option_specs[0])

const struct command commands[] = {
    {"run", "JOB", "train on a private cluster on this machine, from start to result", "DMSOoqh",
     "Starts a coordinator, shards and workers as processes of this machine, trains the job, writes the results and "
     "ends them again.\n"
     "Ctrl-C stops the job and keeps the weights of its last whole step; a second Ctrl-C ends at once.",
     "tally run examples/fashion_cnn.yaml --data 2 --shards 2 --set train.epochs=1", command_run},
    {"validate", "JOB", "check a job file, its model and its data", "DMSoh",
     "Says nothing but `ok` if the job would be taken, else where it is wrong and what was expected. With -o yaml or "
     "json: the whole spec, every default\n"
     "filled in.",
     "tally validate job.yaml", command_validate},
    {"plan", "JOB", "show what each part would do: layers, shapes, memory, slices, micro-batches", "DMSCoh",
     "Makes the plan that `tally run` would make, and prints it without running anything.",
     "tally plan job.yaml --data 3", command_plan},
    {"schema", "[KEY]", "list every field of a job file with type, default and meaning", "oh",
     "With KEY, only that field and those below it.", "tally schema train.optimizer", command_schema},
};
const size_t command_count = sizeof commands / sizeof commands[0];

static const char *const format_names[] = {"table", "json", "yaml", "name"};

void command_help(const struct command *command)
{
    printf("usage: tally %s%s%s [options]\n\n%s\n\noptions:\n", command->name, command->operand ? " " : "",
           command->operand ? command->operand : "", command->description);
    for (size_t i = 0; i < OPTION_COUNT; i++) {
        const struct option_spec *o = &option_specs[i];
        if (!strchr(command->options, o->letter))
            continue;
        char left[64];
        bool has_short = o->letter >= 'a' && o->letter <= 'z';
        snprintf(left, sizeof left, "%c%c%s--%s%s%s", has_short ? '-' : ' ', has_short ? o->letter : ' ',
                 has_short ? ", " : "  ", o->name, o->value ? " " : "", o->value ? o->value : "");
        printf("  %-28s %s\n", left, o->help);
    }
    printf("\nexample:\n  %s\n", command->example);
}

/* Digits alone, 1 to max. */
static bool parse_count(const char *text, uint32_t max, uint32_t *ret_value)
{
    char *end = NULL;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value < 1 || value > max)
        return false;
    *ret_value = (uint32_t)value;
    return true;
}

static int take_option(const struct command *command, const struct option_spec *o, const char *value,
                       struct arguments *a)
{
    uint32_t max;
    switch (o->letter) {
    case 'D':
    case 'M':
        max = o->letter == 'D' ? 1024 : 256; /* as parallel.data and parallel.shards */
        if (!parse_count(value, max, o->letter == 'D' ? &a->data : &a->shards)) {
            fprintf(stderr, "tally %s: --%s: found `%s`, expected a whole number from 1 to %u\n", command->name,
                    o->name, value, max);
            return EXIT_USAGE;
        }
        break;
    case 'S':
        if (a->set_count == ARGUMENTS_SET_MAX) {
            fprintf(stderr, "tally %s: --set may be given %d times at most\n", command->name, ARGUMENTS_SET_MAX);
            return EXIT_USAGE;
        }
        a->set[a->set_count++] = value;
        break;
    case 'O':
        a->out = value;
        break;
    case 'C':
        a->schedule = true;
        break;
    case 'o':
        a->svg = strchr(command->options, 'C') && strcmp(value, "svg") == 0;
        if (a->svg)
            return EXIT_DONE;
        for (size_t i = 0; i < sizeof format_names / sizeof format_names[0]; i++) {
            if (strcmp(value, format_names[i]) == 0) {
                a->format = (enum output_format)i;
                return EXIT_DONE;
            }
        }
        fprintf(stderr, "tally %s: -o: found `%s`, expected table, json, yaml or name\n", command->name, value);
        return EXIT_USAGE;
    case 'q':
        a->quiet = true;
        break;
    default:
        a->help = true;
    }
    return EXIT_DONE;
}

/* getopt's tables from option_specs. */
static void getopt_tables(const struct command *command, struct option *longs, char *shorts)
{
    size_t n = 0;
    *shorts++ = ':';
    for (size_t i = 0; i < OPTION_COUNT; i++) {
        const struct option_spec *o = &option_specs[i];
        if (!strchr(command->options, o->letter))
            continue;
        longs[n++] = (struct option){o->name, o->value ? required_argument : no_argument, NULL, o->letter};
        if (o->letter >= 'a' && o->letter <= 'z') {
            *shorts++ = o->letter;
            if (o->value)
                *shorts++ = ':';
        }
    }
    longs[n] = (struct option){0};
    *shorts = '\0';
}

int arguments_parse(const struct command *command, int argc, char **argv, struct arguments *ret_arguments)
{
    struct arguments a = {0};
    struct option longs[OPTION_COUNT + 1];
    char shorts[2 * OPTION_COUNT + 2];
    getopt_tables(command, longs, shorts);
    opterr = 0;
    optind = 1;
    int letter;
    while ((letter = getopt_long(argc, argv, shorts, longs, NULL)) != -1) {
        if (letter == '?' || letter == ':') {
            const char *given = argv[optind - 1];
            if (letter == ':')
                fprintf(stderr, "tally %s: %s needs a value (see `tally %s --help`)\n", command->name, given,
                        command->name);
            else
                fprintf(stderr, "tally %s: unknown option `%s` (see `tally %s --help`)\n", command->name, given,
                        command->name);
            return EXIT_USAGE;
        }
        for (size_t i = 0; i < OPTION_COUNT; i++) {
            if (option_specs[i].letter == letter) {
                int code = take_option(command, &option_specs[i], optarg, &a);
                if (code != EXIT_DONE)
                    return code;
            }
        }
    }
    if (optind < argc && command->operand)
        a.operand = argv[optind++];
    if (optind < argc) {
        fprintf(stderr, "tally %s: unexpected `%s` (see `tally %s --help`)\n", command->name, argv[optind],
                command->name);
        return EXIT_USAGE;
    }
    if (!a.help && !a.operand && command->operand && command->operand[0] != '[') {
        fprintf(stderr, "tally %s: %s is missing (see `tally %s --help`)\n", command->name, command->operand,
                command->name);
        return EXIT_USAGE;
    }
    if (a.svg && !a.schedule) {
        fprintf(stderr, "tally %s: -o svg is for --schedule alone (see `tally %s --help`)\n", command->name,
                command->name);
        return EXIT_USAGE;
    }
    *ret_arguments = a;
    return EXIT_DONE;
}

int exit_code_of(tally_status status)
{
    switch (status) {
    case TALLY_OK:
        return EXIT_DONE;
    case TALLY_EINVAL:
    case TALLY_EEXIST:
    case TALLY_EUNSUPPORTED:
    case TALLY_ESTATE:
        return EXIT_USAGE;
    case TALLY_ENOTFOUND:
        return EXIT_NOT_FOUND;
    case TALLY_ETIMEDOUT:
    case TALLY_EUNAVAIL:
        return EXIT_UNREACHABLE;
    case TALLY_EDENIED:
        return EXIT_DENIED;
    case TALLY_ECANCELLED:
        return EXIT_STOPPED;
    case TALLY_EIO:
    case TALLY_ENOMEM:
    case TALLY_EINTERNAL:
        break;
    }
    return EXIT_INTERNAL;
}

int report_error(const struct tally_error *err)
{
    fprintf(stderr, "tally: %s\n", err->message);
    return exit_code_of(err->code);
}
