#include "common/daemon.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "common/file.h"
#include "common/version.h"

#define EXIT_USAGE 2
#define DIE "--die-with-parent"

static void print_help(const char *program, const char *purpose, const struct daemon_option *options, size_t count)
{
    printf("%s: %s\n\n", program, purpose);
    for (size_t i = 0; i < count; i++) {
        const struct daemon_option *option = &options[i];
        char left[64];
        snprintf(left, sizeof left, "--%s %s", option->name, option->argument);
        printf("  %-24s %s", left, option->help);
        if (option->required)
            printf(" (required)\n");
        else if (option->value)
            printf(" (default: %s)\n", option->value);
        else
            printf("\n");
    }
    printf("  %-24s %s\n", "--log-level LEVEL", "debug, info, warn or error (default: info)");
    printf("  %-24s %s\n", "--die-with-parent[=PID]", "end when the process that started this one ends");
    printf("  %-24s %s\n", "--help", "print this");
    printf("  %-24s %s\n", "--version", "print the version");
}

static int usage(const char *program, const char *problem, const char *what)
{
    fprintf(stderr, "%s: %s%s (see --help)\n", program, problem, what);
    return EXIT_USAGE;
}

/* The parent may have gone before the request was made: then its child has another one by now, mostly process 1. */
static int die_with_parent(const char *program, const char *expected)
{
    pid_t parent = getppid();
    char text[24];
    snprintf(text, sizeof text, "%ld", (long)parent);
    bool wrong = expected[0] ? strcmp(expected, text) != 0 : parent == 1;
    if (wrong || prctl(PR_SET_PDEATHSIG, SIGTERM) != 0 || getppid() != parent) {
        fprintf(stderr, "%s: the process that started it has ended\n", program);
        return 1;
    }
    return DAEMON_GO_ON;
}

/* The option that text names; *ret_value is what stands behind its =, or NULL. */
static struct daemon_option *find(struct daemon_option *options, size_t count, const char *text, const char **ret_value)
{
    size_t length = strcspn(text, "=");
    for (size_t i = 0; i < count; i++)
        if (strlen(options[i].name) == length && strncmp(options[i].name, text, length) == 0) {
            *ret_value = text[length] == '=' ? text + length + 1 : NULL;
            return &options[i];
        }
    return NULL;
}

static int parse(const char *program, const char *purpose, int argc, char **argv, struct daemon_option *options,
                 size_t count, struct daemon_option *log_level, const char **ret_parent)
{
    for (int i = 1; i < argc; i++) {
        const char *text = argv[i], *value = NULL;
        if (strcmp(text, "--help") == 0 || strcmp(text, "-h") == 0) {
            print_help(program, purpose, options, count);
            return 0;
        }
        if (strcmp(text, "--version") == 0) {
            printf("%s %s\n", program, TALLY_VERSION);
            return 0;
        }
        if (strncmp(text, DIE, strlen(DIE)) == 0 && (text[strlen(DIE)] == '\0' || text[strlen(DIE)] == '=')) {
            *ret_parent = text + strlen(DIE) + (text[strlen(DIE)] == '=');
            continue;
        }
        if (strncmp(text, "--", 2) != 0)
            return usage(program, "unexpected argument ", text);
        struct daemon_option *option = find(options, count, text + 2, &value);
        if (!option)
            option = find(log_level, 1, text + 2, &value);
        if (!option)
            return usage(program, "unknown option ", text);
        if (!value && i + 1 < argc)
            value = argv[++i];
        if (!value || value[0] == '\0')
            return usage(program, "no value given for ", text);
        option->value = value;
    }
    return DAEMON_GO_ON;
}

static void mask_signals(int how)
{
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(how, &signals, NULL);
}

void daemon_take_signals(void)
{
    mask_signals(SIG_UNBLOCK);
}

void daemon_ignore_signals(void)
{
    signal(SIGTERM, SIG_IGN);
    signal(SIGINT, SIG_IGN);
}

static int end_code;

static void on_alarm(int number)
{
    (void)number;
    _exit(end_code);
}

void daemon_end_within(unsigned seconds, int exit_code)
{
    end_code = exit_code;
    signal(SIGALRM, on_alarm);
    alarm(seconds);
}

/* The usual 1024 are a limit for programs that use select, which nothing here does; a coordinator holds a connection a
 * node and client. */
static void raise_descriptor_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit); /* where it is refused the old one stays */
    }
}

int daemon_parse(const char *program, const char *purpose, int argc, char **argv, struct daemon_option *options,
                 size_t count, enum tally_log_level *ret_level)
{
    struct daemon_option log_level = {.name = "log-level", .value = "info"};
    const char *parent = NULL;
    if (!file_guard_standard())
        return 1;
    int code = parse(program, purpose, argc, argv, options, count, &log_level, &parent);
    if (code != DAEMON_GO_ON)
        return code;
    if (tally_log_level_parse(log_level.value, ret_level) != 0)
        return usage(program, "no such log level: ", log_level.value);
    for (size_t i = 0; i < count; i++)
        if (options[i].required && !options[i].value)
            return usage(program, "missing option --", options[i].name);
    raise_descriptor_limit();
    mask_signals(SIG_BLOCK);
    return parent ? die_with_parent(program, parent) : DAEMON_GO_ON;
}

int daemon_number(const char *program, const struct daemon_option *option, long max, long *ret_value)
{
    char *end;
    errno = 0;
    long value = strtol(option->value, &end, 10);
    if (errno != 0 || *end != '\0' || value < 0 || value > max) {
        fprintf(stderr, "%s: --%s %s: expected a whole number from 0 to %ld\n", program, option->name, option->value,
                max);
        return -1;
    }
    *ret_value = value;
    return 0;
}
