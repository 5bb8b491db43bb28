#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/command.h"
#include "common/file.h"
#include "common/log.h"
#include "common/spec_file.h"
#include "common/version.h"

static void usage(FILE *out)
{
    fprintf(out,
            "usage: tally COMMAND [options]\n\nTally trains models with workers and parameter servers.\n\ncommands:\n");
    for (size_t i = 0; i < command_count; i++) {
        char left[32];
        snprintf(left, sizeof left, "%s%s%s", commands[i].name, commands[i].operand ? " " : "",
                 commands[i].operand ? commands[i].operand : "");
        fprintf(out, "  %-16s %s\n", left, commands[i].summary);
    }
    fprintf(out, "\n`tally COMMAND --help` tells more. Exit status: 0 done, 1 internal error, 2 usage or a refused job "
                 "file, 3 job failed, 4 job stopped,\n"
                 "5 not found, 6 unreachable or timed out, 7 denied.\n");
}

static const struct command *find(const char *name)
{
    for (size_t i = 0; i < command_count; i++) {
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    }
    return NULL;
}

static int unknown_command(const char *name)
{
    const char *names[16];
    size_t n = 0;
    for (size_t i = 0; i < command_count && n < sizeof names / sizeof names[0]; i++)
        names[n++] = commands[i].name;
    const char *nearest = spec_nearest(name, names, n);
    fprintf(stderr, "tally: no command `%s`%s%s%s (see `tally --help`)\n", name, nearest ? "; did you mean `" : "",
            nearest ? nearest : "", nearest ? "`?" : "");
    return EXIT_USAGE;
}

/* Of a run whose loop does not handle signals yet: there is nothing to stop. */
static void on_early_signal(int number)
{
    static const char text[] = "tally: the job was stopped: interrupted before it began\n";
    (void)number;
    (void)!write(STDERR_FILENO, text, sizeof text - 1);
    _exit(EXIT_STOPPED);
}

int main(int argc, char **argv)
{
    if (!file_guard_standard())
        return EXIT_INTERNAL;
    signal(SIGPIPE, SIG_IGN); /* a closed stdout is seen as an error of write */
    tally_log_init("tally", NULL, TALLY_LOG_WARN);
    if (argc < 2) {
        usage(stderr);
        return EXIT_USAGE;
    }
    const char *word = argv[1];
    if (strcmp(word, "--version") == 0 || strcmp(word, "version") == 0) {
        printf("tally %s\n", TALLY_VERSION);
        return EXIT_DONE;
    }
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || (strcmp(word, "help") == 0 && argc == 2)) {
        usage(stdout);
        return EXIT_DONE;
    }
    bool help = strcmp(word, "help") == 0;
    const struct command *command = find(help ? argv[2] : word);
    if (!command)
        return unknown_command(help ? argv[2] : word);
    struct arguments arguments = {0};
    int code = help ? EXIT_DONE : arguments_parse(command, argc - 1, argv + 1, &arguments);
    if (code != EXIT_DONE)
        return code;
    if (help || arguments.help) {
        command_help(command);
        return EXIT_DONE;
    }
    if (command->run == command_run) {
        signal(SIGINT, on_early_signal);
        signal(SIGTERM, on_early_signal);
    }
    code = command->run(&arguments);
    if (fflush(stdout) != 0 && code == EXIT_DONE) {
        perror("tally: stdout");
        code = EXIT_INTERNAL;
    }
    return code;
}
