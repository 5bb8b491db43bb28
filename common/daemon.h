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
 * argv[0] is not looked at; program ("tally-server shard") and purpose (a line) are for the help. Returns DAEMON_GO_ON,
 * or the process's exit code: 0 after --help and --version, 2 after one sentence on stderr about what is wrong. With
 * --die-with-parent the process is sent SIGTERM when its parent ends; 1 where that has happened already.
 */
int daemon_parse(const char *program, const char *purpose, int argc, char **argv, struct daemon_option *options,
                 size_t count, enum tally_log_level *ret_level);

/* The value of an option that is a number from 0 to max. Returns 0, or -1 after one sentence on stderr. */
int daemon_number(const char *program, const struct daemon_option *option, long max, long *ret_value);
#endif
