#include "client/progress.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "common/clock.h"

#define TERMINAL_INTERVAL_NS (INT64_C(100) * 1000000)
#define PLAIN_INTERVAL_NS (INT64_C(3) * 1000000000)
#define BAR_MAX 40

void progress_init(struct progress *progress, bool quiet)
{
    *progress = (struct progress){.on = !quiet, .terminal = isatty(STDERR_FILENO) == 1};
    const char *term = getenv("TERM");
    if (term && strcmp(term, "dumb") == 0)
        progress->terminal = false;
}

void progress_text(struct progress *progress, const char *text)
{
    snprintf(progress->text, sizeof progress->text, "%s", text);
}

/* 1,234,567 */
static void grouped(double value, char text[32])
{
    char digits[32];
    int n = snprintf(digits, sizeof digits, "%.0f", value);
    size_t used = 0;
    for (int i = 0; i < n && used + 2 < 32; i++) {
        if (i > 0 && (n - i) % 3 == 0)
            text[used++] = ',';
        text[used++] = digits[i];
    }
    text[used] = '\0';
}

static void eta_text(const struct run_progress *p, double rate, char text[32])
{
    if (rate <= 0 || p->steps == 0 || p->step == 0) {
        snprintf(text, 32, "?");
        return;
    }
    double left = (double)(p->steps - p->step) * ((double)p->samples / (double)p->step) / rate;
    unsigned seconds = left > 359999 ? 359999 : (unsigned)lround(left);
    if (seconds >= 3600)
        snprintf(text, 32, "%u:%02u:%02u", seconds / 3600, seconds / 60 % 60, seconds % 60);
    else
        snprintf(text, 32, "%u:%02u", seconds / 60, seconds % 60);
}

static size_t state_text(const struct run_progress *p, char *text, size_t size)
{
    char rate_text[32];
    char eta[32];
    double rate = p->recent_per_second > 0 ? p->recent_per_second : p->samples_per_second;
    grouped(rate, rate_text);
    eta_text(p, rate, eta);
    int n =
        snprintf(text, size, "step %llu/%llu  epoch %llu  loss %.4f  %s samples/s  ETA %s", (unsigned long long)p->step,
                 (unsigned long long)p->steps, (unsigned long long)p->epoch, p->loss, rate_text, eta);
    if (p->has_eval && n > 0 && (size_t)n < size) {
        if (p->eval_accuracy >= 0)
            n += snprintf(text + n, size - (size_t)n, "  test accuracy %.4f", p->eval_accuracy);
        else
            n += snprintf(text + n, size - (size_t)n, "  test loss %.4f", p->eval_loss);
    }
    return n < 0 ? 0 : (size_t)n;
}

static void draw_bar(struct progress *progress, const struct run_progress *p)
{
    struct winsize window;
    size_t columns = ioctl(STDERR_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 0 ? window.ws_col : 80;
    char state[256];
    size_t length = state_text(p, state, sizeof state);
    size_t bar = columns > length + 5 ? columns - length - 5 : 0;
    if (bar > BAR_MAX)
        bar = BAR_MAX;
    size_t full = p->steps > 0 ? (size_t)((double)bar * (double)p->step / (double)p->steps) : 0;
    char line[BAR_MAX + 1];
    for (size_t i = 0; i < bar; i++)
        line[i] = i < full ? '#' : '.';
    line[bar] = '\0';
    fprintf(stderr, "\r\033[K%s%s%s%.*s", bar ? "[" : "", line, bar ? "] " : "", (int)(columns > 1 ? columns - 1 : 1),
            state);
    progress->drawn = true;
}

void progress_draw(struct progress *progress, const struct run_progress *p)
{
    int64_t now = tally_now_ns();
    if (!progress->on || now - progress->last_ns < (progress->terminal ? TERMINAL_INTERVAL_NS : PLAIN_INTERVAL_NS))
        return;
    if (!progress->terminal && (progress->last_ns == 0 || (p->step > 0 && p->step == progress->last_step))) {
        if (progress->last_ns == 0)
            progress->last_ns = now; /* the first line comes after an interval */
        return;
    }
    progress->last_ns = now;
    progress->last_step = p->step;
    if (p->step == 0) {
        fprintf(stderr, "%s%s%s", progress->terminal ? "\r\033[K" : "", progress->text, progress->terminal ? "" : "\n");
        progress->drawn = progress->terminal;
    } else if (progress->terminal) {
        draw_bar(progress, p);
    } else {
        char state[256];
        state_text(p, state, sizeof state);
        fprintf(stderr, "%s\n", state);
    }
    fflush(stderr);
}

void progress_message(struct progress *progress, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (progress->drawn)
        fprintf(stderr, "\r\033[K");
    progress->drawn = false;
    fprintf(stderr, "tally: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
}

void progress_end(struct progress *progress, const struct run_progress *p)
{
    if (!progress->on || !progress->terminal)
        return;
    if (p->step > 0)
        draw_bar(progress, p);
    if (progress->drawn)
        fprintf(stderr, "\n");
    progress->drawn = false;
}
