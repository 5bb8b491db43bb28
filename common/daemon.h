#ifndef COMMON_DAEMON_H
#define COMMON_DAEMON_H
/* What the command lines of all daemons have in common: options with an argument, --log-level, --die-with-parent,
 * --help and
 * --version. For main() files. */
#include <stdbool.h>
#include <stddef.h>

#include "common/log.h"

struct daemon_option {
    const char *name;     /* "listen": given as --listen ADDR or --listen=ADDR */
    const char *argument; /* "ADDR", for the help */
    const char *help;
    bool required;
    const char *value; /* the default, then what was given */
};

#define DAEMON_GO_ON (-1)

/*
 * Guards the standard descriptors (file_guard_standard) and lets as many be opened as the user may. argv[0] is not
 * looked at; program ("tally-server shard") and purpose (a line) are for the help. Returns DAEMON_GO_ON, or the
 * process's exit code: 0 after --help and --version, 2 after one sentence on stderr about what is wrong. With
 * --die-with-parent[=PID] the process is sent SIGTERM when its parent ends; 1 where that has happened already, which
 * only PID can tell in a container, whose first process has number 1.
 */
int daemon_parse(const char *program, const char *purpose, int argc, char **argv, struct daemon_option *options,
                 size_t count, enum tally_log_level *ret_level);

/* Lets in SIGTERM and SIGINT, which daemon_parse holds back so that none ends the process before it can end cleanly.
 * For the thread that handles them, once it does: the threads that were started before it never see them. */
void daemon_take_signals(void);
/*
 * The end of the process, with exit_code, is at most so many seconds away, whatever hangs: gRPC's shutdown waits for
 * ever where there was no memory for one of its threads.
 */
void daemon_end_within(unsigned seconds, int exit_code);
/* Ignores them from now on: as soon as the handlers have been given up, so that a second one does not spoil a clean
 * end. */
void daemon_ignore_signals(void);

/* The value of an option that is a number from 0 to max. Returns 0, or -1 after one sentence on stderr. */
int daemon_number(const char *program, const struct daemon_option *option, long max, long *ret_value);
#endif
