#ifndef MODEL_SCHEDULE_CHART_H
#define MODEL_SCHEDULE_CHART_H
/* A simulated schedule as a time chart: a row a segment, under its stage. */
#include <stdio.h>

#include "model/schedule.h"

#define SCHEDULE_CHART_WIDTH 100

/* Columns of equal time; a forward is the last digit of its micro-batch, a backward a letter (a: 0, b: 1, ...), idle
 * time a point. TALLY_EIO: out does not take it. */
tally_status schedule_chart_text(FILE *out, const struct schedule *schedule, const struct schedule_report *report,
                                 size_t width, struct tally_error *err);

/* The same as an SVG picture. */
tally_status schedule_chart_svg(FILE *out, const struct schedule *schedule, const struct schedule_report *report,
                                struct tally_error *err);
#endif
