#include "common/error.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Messages quote what files and requests hold: one line of well-formed text is left of it, whatever that was. Each byte
 * that is none becomes one character, so the message keeps its length. */
static void make_printable(char *text)
{
    for (unsigned char *c = (unsigned char *)text; *c;) {
        size_t more = *c < 0x80 ? 0 : *c < 0xc2 ? SIZE_MAX : *c < 0xe0 ? 1 : *c < 0xf0 ? 2 : *c < 0xf5 ? 3 : SIZE_MAX;
        size_t n = 0;
        while (more != SIZE_MAX && n < more && (c[n + 1] & 0xc0) == 0x80)
            n++;
        if (n == more && *c >= 0x20 && *c != 0x7f) {
            c += more + 1;
            continue;
        }
        *c = *c < 0x20 ? ' ' : '?';
        c++;
    }
}

tally_status tally_failv(struct tally_error *err, tally_status code, const char *format, va_list args)
{
    if (err) {
        err->code = code;
        vsnprintf(err->message, sizeof err->message, format, args);
        make_printable(err->message);
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
        make_printable(err->message);
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
    make_printable(err->message);
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
