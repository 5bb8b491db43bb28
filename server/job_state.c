#include "server/job_state.h"

#include <assert.h>

enum {
    COLLECT = JOB_ACT_COLLECT,
    OPEN = JOB_ACT_OPEN_SHARDS,
    ASSIGN = JOB_ACT_ASSIGN_WORKERS,
    END_WORKERS = JOB_ACT_END_WORKERS,
    END_NODES = JOB_ACT_END_NODES,
    CANCEL = JOB_ACT_CANCEL_COLLECT,
    SET = JOB_ACT_SET_REASON,
    ADD = JOB_ACT_ADD_REASON,
    LEAD = JOB_ACT_LEAD_REASON,
};

struct cell {
    bool set;
    enum job_phase phase;
    unsigned actions;
};

/* What is not in the table changes nothing. */
#define TO(next, what)                                                                                                 \
    {                                                                                                                  \
        true, next, what                                                                                               \
    }

static const struct cell table[JOB_PHASES][JOB_EVENTS] =
    {
        [JOB_QUEUED] =
            {
                [JOB_EVENT_GANG] = TO(JOB_OPENING, OPEN | SET),
                [JOB_EVENT_STOP] = TO(JOB_STOPPED, SET),
                [JOB_EVENT_FAILED] = TO(JOB_FAILED, SET),
            },
        [JOB_OPENING] =
            {
                [JOB_EVENT_OPENED] = TO(JOB_ASSIGNING, ASSIGN | SET),
                /* No weights are there to be kept. */
                [JOB_EVENT_STOP] = TO(JOB_STOPPED, END_NODES | SET),
                [JOB_EVENT_FAILED] = TO(JOB_FAILED, END_NODES | SET),
                [JOB_EVENT_SHARD_LOST] = TO(JOB_FAILED, END_NODES | SET),
                [JOB_EVENT_DEADLINE] = TO(JOB_FAILED, END_NODES | SET),
                [JOB_EVENT_RESTARTED] = TO(JOB_FAILED, SET),
            },
        [JOB_ASSIGNING] =
            {
                [JOB_EVENT_STARTED] = TO(JOB_TRAINING, SET),
                [JOB_EVENT_STOP] = TO(JOB_STOP_DRAINING, END_WORKERS | SET),
                [JOB_EVENT_FAILED] = TO(JOB_FAIL_DRAINING, END_WORKERS | SET),
                [JOB_EVENT_SHARD_LOST] = TO(JOB_FAILED, END_NODES | SET),
                [JOB_EVENT_DEADLINE] = TO(JOB_FAIL_DRAINING, END_WORKERS | SET),
                [JOB_EVENT_RESTARTED] = TO(JOB_FAILED, SET),
            },
        [JOB_TRAINING] =
            {
                [JOB_EVENT_TRAINED] = TO(JOB_COLLECTING, COLLECT | SET),
                [JOB_EVENT_STOP] = TO(JOB_STOP_DRAINING, END_WORKERS | SET),
                [JOB_EVENT_FAILED] = TO(JOB_FAIL_DRAINING, END_WORKERS | SET),
                [JOB_EVENT_SHARD_LOST] = TO(JOB_FAILED, END_NODES | SET),
                [JOB_EVENT_DEADLINE] = TO(JOB_FAIL_DRAINING, END_WORKERS | SET),
                [JOB_EVENT_RESTARTED] = TO(JOB_FAILED, SET),
            },
        [JOB_COLLECTING] =
            {
                /* A stop comes too late, and workers have nothing more to do: neither spoils a job whose steps are all
                   done. */
                [JOB_EVENT_COLLECTED] = TO(JOB_SUCCEEDED, END_NODES | SET),
                [JOB_EVENT_COLLECT_FAILED] = TO(JOB_FAILED, END_NODES | SET),
                [JOB_EVENT_SHARD_LOST] = TO(JOB_FAILED, CANCEL | END_NODES | SET),
                [JOB_EVENT_RESTARTED] = TO(JOB_FAILED, SET),
            },
        [JOB_STOP_DRAINING] =
            {
                [JOB_EVENT_DRAINED] = TO(JOB_STOP_KEEPING, COLLECT),
                [JOB_EVENT_DEADLINE] = TO(JOB_STOP_KEEPING, COLLECT),
                [JOB_EVENT_SHARD_LOST] = TO(JOB_FAILED, END_NODES | SET),
                [JOB_EVENT_RESTARTED] = TO(JOB_FAILED, SET),
            },
        [JOB_STOP_KEEPING] =
            {
                [JOB_EVENT_COLLECTED] = TO(JOB_STOPPED, END_NODES),
                [JOB_EVENT_COLLECT_FAILED] = TO(JOB_FAILED, END_NODES | SET),
                [JOB_EVENT_SHARD_LOST] = TO(JOB_FAILED, CANCEL | END_NODES | SET),
                [JOB_EVENT_RESTARTED] = TO(JOB_FAILED, SET),
            },
        [JOB_FAIL_DRAINING] =
            {
                /* The first failure is the reason, what it draws behind it is not; but a loss is what others complained
                   of. */
                [JOB_EVENT_DRAINED] = TO(JOB_FAIL_KEEPING, COLLECT),
                [JOB_EVENT_DEADLINE] = TO(JOB_FAIL_KEEPING, COLLECT),
                [JOB_EVENT_SHARD_LOST] = TO(JOB_FAILED, END_NODES | LEAD),
                [JOB_EVENT_RESTARTED] = TO(JOB_FAILED, ADD),
            },
        [JOB_FAIL_KEEPING] =
            {
                [JOB_EVENT_COLLECTED] = TO(JOB_FAILED, END_NODES),
                [JOB_EVENT_COLLECT_FAILED] = TO(JOB_FAILED, END_NODES | ADD),
                [JOB_EVENT_SHARD_LOST] = TO(JOB_FAILED, CANCEL | END_NODES | LEAD),
                [JOB_EVENT_RESTARTED] = TO(JOB_FAILED, ADD),
            },
};

struct job_transition job_next(enum job_phase phase, enum job_event event)
{
    assert(phase < JOB_PHASES && event < JOB_EVENTS);
    const struct cell *cell = &table[phase][event];
    if (!cell->set)
        return (struct job_transition){.phase = phase};
    return (struct job_transition){.phase = cell->phase, .actions = cell->actions};
}

Tally__V1__JobState job_phase_state(enum job_phase phase)
{
    switch (phase) {
    case JOB_QUEUED:
        return TALLY__V1__JOB_STATE__QUEUED;
    case JOB_OPENING:
    case JOB_ASSIGNING:
        return TALLY__V1__JOB_STATE__STARTING;
    case JOB_TRAINING:
    case JOB_COLLECTING:
        return TALLY__V1__JOB_STATE__RUNNING;
    case JOB_STOP_DRAINING:
    case JOB_STOP_KEEPING:
    case JOB_FAIL_DRAINING:
    case JOB_FAIL_KEEPING:
        return TALLY__V1__JOB_STATE__STOPPING;
    case JOB_SUCCEEDED:
        return TALLY__V1__JOB_STATE__SUCCEEDED;
    case JOB_FAILED:
        return TALLY__V1__JOB_STATE__FAILED;
    case JOB_STOPPED:
        return TALLY__V1__JOB_STATE__STOPPED;
    case JOB_PHASES:
        break;
    }
    return TALLY__V1__JOB_STATE__JOB_UNKNOWN;
}

enum job_phase job_phase_of_state(Tally__V1__JobState state)
{
    switch (state) {
    case TALLY__V1__JOB_STATE__QUEUED:
        return JOB_QUEUED;
    case TALLY__V1__JOB_STATE__STARTING:
        return JOB_OPENING;
    case TALLY__V1__JOB_STATE__RUNNING:
        return JOB_TRAINING;
    case TALLY__V1__JOB_STATE__STOPPING:
        return JOB_STOP_DRAINING;
    case TALLY__V1__JOB_STATE__SUCCEEDED:
        return JOB_SUCCEEDED;
    case TALLY__V1__JOB_STATE__STOPPED:
        return JOB_STOPPED;
    default:
        return JOB_FAILED;
    }
}

bool job_phase_is_terminal(enum job_phase phase)
{
    return phase == JOB_SUCCEEDED || phase == JOB_FAILED || phase == JOB_STOPPED;
}

bool job_phase_has_gang(enum job_phase phase)
{
    return phase != JOB_QUEUED && !job_phase_is_terminal(phase);
}

enum job_patience job_phase_patience(enum job_phase phase)
{
    switch (phase) {
    case JOB_OPENING:
    case JOB_ASSIGNING:
        return JOB_WAITS_FOR_START;
    case JOB_STOP_DRAINING:
    case JOB_FAIL_DRAINING:
        return JOB_WAITS_FOR_END;
    default:
        return JOB_WAITS_ON;
    }
}

const char *job_phase_text(enum job_phase phase)
{
    static const char *const texts[JOB_PHASES] = {
        [JOB_QUEUED] = "queued",
        [JOB_OPENING] = "opening",
        [JOB_ASSIGNING] = "assigning",
        [JOB_TRAINING] = "training",
        [JOB_COLLECTING] = "collecting",
        [JOB_STOP_DRAINING] = "draining for a stop",
        [JOB_STOP_KEEPING] = "keeping the weights for a stop",
        [JOB_FAIL_DRAINING] = "draining after a failure",
        [JOB_FAIL_KEEPING] = "keeping the weights after a failure",
        [JOB_SUCCEEDED] = "succeeded",
        [JOB_FAILED] = "failed",
        [JOB_STOPPED] = "stopped",
    };
    return phase < JOB_PHASES ? texts[phase] : "unknown";
}

const char *job_event_text(enum job_event event)
{
    static const char *const texts[JOB_EVENTS] = {
        [JOB_EVENT_GANG] = "gang",
        [JOB_EVENT_OPENED] = "opened",
        [JOB_EVENT_STARTED] = "started",
        [JOB_EVENT_TRAINED] = "trained",
        [JOB_EVENT_DRAINED] = "drained",
        [JOB_EVENT_COLLECTED] = "collected",
        [JOB_EVENT_COLLECT_FAILED] = "collect failed",
        [JOB_EVENT_STOP] = "stop",
        [JOB_EVENT_FAILED] = "failed",
        [JOB_EVENT_SHARD_LOST] = "shard lost",
        [JOB_EVENT_DEADLINE] = "deadline",
        [JOB_EVENT_RESTARTED] = "restarted",
    };
    return event < JOB_EVENTS ? texts[event] : "unknown";
}
