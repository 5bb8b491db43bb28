#ifndef CLIENT_PROGRESS_H
#define CLIENT_PROGRESS_H
/* The progress line on stderr: on a terminal a bar that is redrawn, otherwise a plain line every few seconds. */
#include <stdbool.h>
#include <stdint.h>

#include "client/run_output.h"

struct progress {
    bool on;
    bool terminal;
    bool drawn;      /* an unfinished line is on the terminal */
    int64_t last_ns; /* of the last line */
    uint64_t last_step;
    char text[64]; /* what is going on before the first step */
};

void progress_init(struct progress *progress, bool quiet);
/* What it waits for, until steps come: "waits for 2 workers". */
void progress_text(struct progress *progress, const char *text);
/* Call often; draws when it is time. */
void progress_draw(struct progress *progress, const struct run_progress *p);
/* A message to stderr of its own, above the bar. */
void progress_message(struct progress *progress, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Draws the last state and ends the line. */
void progress_end(struct progress *progress, const struct run_progress *p);
#endif
