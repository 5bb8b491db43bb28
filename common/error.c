#include "common/error.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

tally_status tally_failv(struct tally_error *err, tally_status code, const char *format, va_list args)
{
    if (err) {
        err->code = code;
        vsnprintf(err->message, sizeof err->message, format, args);
    }
    return code;
}

tally_status tally_fail(struct tally_error *err, tally_status code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    tally_failv(err, code, format, args);
    va_end(args);
    return code;
}

tally_status tally_fail_errno(struct tally_error *err, const char *format, ...)
{
    int saved = errno;
    tally_status code = saved == ENOENT ? TALLY_ENOTFOUND : saved == ENOMEM ? TALLY_ENOMEM : TALLY_EIO;
    if (err) {
        char text[TALLY_ERROR_MESSAGE_MAX - 160];
        char reason[128];
        va_list args;
        va_start(args, format);
        vsnprintf(text, sizeof text, format, args);
        va_end(args);
        err->code = code;
        snprintf(err->message, sizeof err->message, "%s: %s", text, strerror_r(saved, reason, sizeof reason));
    }
    return code;
}

tally_status tally_error_prefix(struct tally_error *err, const char *format, ...)
{
    if (!err)
        return TALLY_EINTERNAL;
    char old[TALLY_ERROR_MESSAGE_MAX];
    char context[TALLY_ERROR_MESSAGE_MAX / 2];
    memcpy(old, err->message, sizeof old);
    va_list args;
    va_start(args, format);
    vsnprintf(context, sizeof context, format, args);
    va_end(args);
    int n = snprintf(err->message, sizeof err->message, "%s: ", context);
    size_t used = n < 0 ? 0 : (size_t)n;
    size_t left = used < sizeof err->message ? sizeof err->message - used - 1 : 0;
    size_t take = strnlen(old, left);
    memcpy(err->message + used, old, take);
    err->message[used + take] = '\0';
    return err->code;
}

const char *tally_status_text(tally_status code)
{
    switch (code) {
    case TALLY_OK:
        return "ok";
    case TALLY_EINVAL:
        return "invalid argument";
    case TALLY_ENOTFOUND:
        return "not found";
    case TALLY_EEXIST:
        return "exists already";
    case TALLY_EIO:
        return "input or output failed";
    case TALLY_ENOMEM:
        return "out of memory";
    case TALLY_ETIMEDOUT:
        return "timed out";
    case TALLY_EUNAVAIL:
        return "unavailable";
    case TALLY_ECANCELLED:
        return "cancelled";
    case TALLY_EDENIED:
        return "denied";
    case TALLY_EUNSUPPORTED:
        return "not supported";
    case TALLY_ESTATE:
        return "not in this state";
    case TALLY_EINTERNAL:
        return "internal error";
    }
    return "unknown status";
}
