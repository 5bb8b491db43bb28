#include "model/schedule_chart.h"

#include <stdlib.h>
#include <string.h>

#define SVG_WIDTH 1000.0
#define SVG_ROW 22.0
#define SVG_LEFT 110.0

static tally_status written(FILE *out, struct tally_error *err)
{
    return ferror(out) ? tally_fail(err, TALLY_EIO, "the schedule's chart could not be written") : TALLY_OK;
}

/* The first column whose middle is at or behind a time. */
static size_t column_of(uint64_t time, uint64_t makespan, size_t width)
{
    double at = (double)time / (double)makespan * (double)width - 0.5;
    return at <= 0 ? 0 : (size_t)at + ((double)(size_t)at < at);
}

static void fill_row(char *row, size_t width, const struct schedule *schedule, const struct schedule_report *report,
                     uint32_t segment)
{
    uint32_t stage = schedule->stage_of[segment];
    memset(row, '.', width);
    for (size_t i = 0; i < schedule->lists[stage].count; i++) {
        const struct schedule_action *a = &schedule->lists[stage].actions[i];
        const struct schedule_span *span = &report->stage[stage].spans[i];
        char mark = (char)(a->backward ? 'a' + a->micro_batch % 26 : '0' + a->micro_batch % 10);
        size_t end = column_of(span->end, report->makespan, width);
        if (a->segment != segment)
            continue;
        for (size_t c = column_of(span->begin, report->makespan, width); c < end && c < width; c++)
            row[c] = mark;
    }
}

tally_status schedule_chart_text(FILE *out, const struct schedule *schedule, const struct schedule_report *report,
                                 size_t width, struct tally_error *err)
{
    char *row = malloc(width + 1);
    if (!row)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for a chart");
    row[width] = '\0';
    for (uint32_t stage = 0; stage < schedule->stages && report->makespan > 0; stage++) {
        bool first = true;
        for (uint32_t k = 0; k < schedule->segments; k++) {
            if (schedule->stage_of[k] != stage)
                continue;
            fill_row(row, width, schedule, report, k);
            if (first)
                fprintf(out, "stage %-3u part %-3u |%s|\n", stage, k, row);
            else
                fprintf(out, "          part %-3u |%s|\n", k, row);
            first = false;
        }
    }
    free(row);
    return written(out, err);
}

static void svg_span(FILE *out, const struct schedule_action *a, double x, double y, double width)
{
    fprintf(out, "<rect x=\"%.2f\" y=\"%.0f\" width=\"%.2f\" height=\"%.0f\" class=\"%s\">", x, y, width, SVG_ROW - 4,
            a->backward ? "b" : "f");
    fprintf(out, "<title>%s of micro-batch %u, part %u</title></rect>\n", a->backward ? "backward" : "forward",
            a->micro_batch, a->segment);
    if (width >= 14)
        fprintf(out, "<text x=\"%.2f\" y=\"%.0f\" text-anchor=\"middle\">%u</text>\n", x + width / 2, y + SVG_ROW - 9,
                a->micro_batch);
}

tally_status schedule_chart_svg(FILE *out, const struct schedule *schedule, const struct schedule_report *report,
                                struct tally_error *err)
{
    double scale = report->makespan > 0 ? SVG_WIDTH / (double)report->makespan : 0;
    uint32_t row = 0;
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" font-family=\"sans-serif\" "
            "font-size=\"11\">\n<style>.f{fill:#9ecae1}.b{fill:#a1d99b}.n{fill:#f0f0f0}</style>\n",
            SVG_LEFT + SVG_WIDTH + 10, SVG_ROW * (schedule->segments + 2));
    for (uint32_t stage = 0; stage < schedule->stages; stage++)
        for (uint32_t k = 0; k < schedule->segments; k++) {
            if (schedule->stage_of[k] != stage)
                continue;
            double y = SVG_ROW * row++ + 4;
            fprintf(out, "<text x=\"4\" y=\"%.0f\">stage %u, part %u</text>\n", y + SVG_ROW - 9, stage, k);
            fprintf(out, "<rect x=\"%.0f\" y=\"%.0f\" width=\"%.0f\" height=\"%.0f\" class=\"n\"/>\n", SVG_LEFT, y,
                    SVG_WIDTH, SVG_ROW - 4);
            for (size_t i = 0; i < schedule->lists[stage].count; i++) {
                const struct schedule_span *span = &report->stage[stage].spans[i];
                if (schedule->lists[stage].actions[i].segment == k)
                    svg_span(out, &schedule->lists[stage].actions[i], SVG_LEFT + (double)span->begin * scale, y,
                             (double)(span->end - span->begin) * scale);
            }
        }
    fprintf(out,
            "<text x=\"4\" y=\"%.0f\">%s: %u micro-batches, bubble %.1f %% (blue: forward, green: backward)</text>\n",
            SVG_ROW * row + 20, schedule_kind_text(schedule->kind), schedule->micro_batches, 100 * report->bubble);
    fprintf(out, "</svg>\n");
    return written(out, err);
}
