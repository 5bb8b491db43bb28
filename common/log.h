#ifndef COMMON_LOG_H
#define COMMON_LOG_H
/*
 * Log lines in logfmt on stderr: time=... level=info proc=worker name=w0 msg="..." . Only main() files and the control
 * loops of the daemons log; libraries return what went wrong. A line is one write(2), at most TALLY_LOG_LINE_MAX bytes.
 * Thread-safe.
 */
enum tally_log_level { TALLY_LOG_DEBUG, TALLY_LOG_INFO, TALLY_LOG_WARN, TALLY_LOG_ERROR };

/* Call once, before threads start. proc and name are copied; level is the least that is printed. */
void tally_log_init(const char *proc, const char *name, enum tally_log_level level);
/* "debug", "info", "warn", "error"; returns 0, or -1 for another word. */
int tally_log_level_parse(const char *text, enum tally_log_level *ret_level);
void tally_log(enum tally_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define log_debug(...) tally_log(TALLY_LOG_DEBUG, __VA_ARGS__)
#define log_info(...) tally_log(TALLY_LOG_INFO, __VA_ARGS__)
#define log_warn(...) tally_log(TALLY_LOG_WARN, __VA_ARGS__)
#define log_error(...) tally_log(TALLY_LOG_ERROR, __VA_ARGS__)
#endif
