#ifndef COMMON_ERROR_H
#define COMMON_ERROR_H
/*
 * One error type. A function that can fail returns a tally_status and takes, as its last parameter, an optional
 * struct tally_error * into which the reason goes: one sentence for a person, without a trailing full stop or newline.
 * Results (`ret_...`) are written only on success.
 */
#include <stdarg.h>
#include <stdbool.h>

typedef enum tally_status {
    TALLY_OK = 0,
    TALLY_EINVAL,       /* what was given is wrong: an argument, a file's content, a message */
    TALLY_ENOTFOUND,    /* a file, job, node or layer that is not there */
    TALLY_EEXIST,       /* it is there already */
    TALLY_EIO,          /* the operating system refused: the message carries strerror */
    TALLY_ENOMEM,       /* memory, or a limit of common/limits.h */
    TALLY_ETIMEDOUT,    /* a deadline passed; the message names what was waited for */
    TALLY_EUNAVAIL,     /* the other side cannot be reached or went away */
    TALLY_ECANCELLED,   /* ended on request */
    TALLY_EDENIED,      /* not allowed */
    TALLY_EUNSUPPORTED, /* known, but not by this build or machine */
    TALLY_EINTERNAL,    /* a bug */
    TALLY_ESTATE,       /* right in itself, but not in the state things are in now (gRPC's FAILED_PRECONDITION) */
} tally_status;

#define TALLY_ERROR_MESSAGE_MAX 1024

struct tally_error {
    tally_status code;
    char message[TALLY_ERROR_MESSAGE_MAX];
};

/* Sets *err (if err is not NULL) and returns code, so that `return tally_fail(err, TALLY_EINVAL, ...)` is one
 * statement. */
tally_status tally_fail(struct tally_error *err, tally_status code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
tally_status tally_failv(struct tally_error *err, tally_status code, const char *format, va_list args);

/* The same with ": " and the text of errno (read on entry) behind the message; code TALLY_EIO, or ENOMEM or ENOTFOUND
 * where errno says so. */
tally_status tally_fail_errno(struct tally_error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Puts "context: " before the message of *err. Returns err's code. */
tally_status tally_error_prefix(struct tally_error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* "invalid argument", ... : a static string. */
const char *tally_status_text(tally_status code);
#endif
