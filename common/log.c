#include "common/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/limits.h"

/* Set once by tally_log_init, before threads start; read-only afterwards. */
static struct {
    char proc[32];
    char name[64];
    enum tally_log_level level;
} log_state = {"tally", "", TALLY_LOG_INFO};

static const char *const level_names[] = {"debug", "info", "warn", "error"};

void tally_log_init(const char *proc, const char *name, enum tally_log_level level)
{
    snprintf(log_state.proc, sizeof log_state.proc, "%s", proc);
    snprintf(log_state.name, sizeof log_state.name, "%s", name ? name : "");
    log_state.level = level;
}

int tally_log_level_parse(const char *text, enum tally_log_level *ret_level)
{
    for (size_t i = 0; i < sizeof level_names / sizeof level_names[0]; i++) {
        if (strcmp(text, level_names[i]) == 0) {
            *ret_level = (enum tally_log_level)i;
            return 0;
        }
    }
    return -1;
}

/* Appends text in double quotes, with quotes, backslashes and control characters escaped, as far as it fits. Returns
 * the new length. */
static size_t append_quoted(char *line, size_t used, size_t room, const char *text)
{
    if (used + 3 > room)
        return used;
    line[used++] = '"';
    for (; *text && used + 3 < room; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') {
            line[used++] = '\\';
            line[used++] = (char)c;
        } else if (c == '\n') {
            line[used++] = '\\';
            line[used++] = 'n';
        } else {
            line[used++] = c < 0x20 ? ' ' : (char)c;
        }
    }
    line[used++] = '"';
    return used;
}

void tally_log(enum tally_log_level level, const char *format, ...)
{
    if (level < log_state.level)
        return;
    char message[TALLY_LOG_LINE_MAX / 2];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);

    char line[TALLY_LOG_LINE_MAX];
    struct timespec now;
    struct tm utc;
    char stamp[40];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &utc);
    int n = snprintf(line, sizeof line, "time=%s.%03ldZ level=%s proc=%s%s%s msg=", stamp, now.tv_nsec / 1000000,
                     level_names[level], log_state.proc, log_state.name[0] ? " name=" : "", log_state.name);
    size_t used = n < 0 ? 0 : (size_t)n;
    used = append_quoted(line, used, sizeof line - 1, message);
    line[used++] = '\n';
    /* A full or closed stderr is not worth failing for. */
    ssize_t written = write(STDERR_FILENO, line, used);
    (void)written;
}
