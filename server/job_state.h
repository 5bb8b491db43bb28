#ifndef SERVER_JOB_STATE_H
#define SERVER_JOB_STATE_H
/*
 * A job's life as a table: (phase, event) -> (phase, actions). Pure: no clock, no network, no memory. The coordinator
 * feeds it what happened and carries out what it says.
 *
 *   queued -> opening -> assigning -> training -> collecting -> succeeded
 *      |         |           |___________|____________ |
 *      |         |           |  stop, failure          | its shard is lost
 *      |         |           v                         v
 *      |         |        draining -> keeping ----> stopped, failed
 *      |_________|______________________________________^
 *
 * A phase is finer than the JobState that clients see.
 */
#include <stdbool.h>

#include "proto/jobs.pb-c.h"

enum job_phase {
    JOB_QUEUED,        /* waits for its gang */
    JOB_OPENING,       /* shards make the first weights */
    JOB_ASSIGNING,     /* workers open the data and take the weights */
    JOB_TRAINING,      /* steps run */
    JOB_COLLECTING,    /* all steps are done; the weights are fetched and written */
    JOB_STOP_DRAINING, /* a stop was asked for: workers drop the job, so that shards hold still */
    JOB_STOP_KEEPING,  /* ... and the weights so far are fetched and written */
    JOB_FAIL_DRAINING, /* something failed while all shards live: the same */
    JOB_FAIL_KEEPING,
    JOB_SUCCEEDED,
    JOB_FAILED,
    JOB_STOPPED,
    JOB_PHASES,
};

enum job_event {
    JOB_EVENT_GANG,           /* its gang is formed */
    JOB_EVENT_OPENED,         /* every shard holds the first weights */
    JOB_EVENT_STARTED,        /* every worker holds them too */
    JOB_EVENT_TRAINED,        /* every worker has finished, and every step and evaluation was reported */
    JOB_EVENT_DRAINED,        /* every worker has dropped the job, or is lost */
    JOB_EVENT_COLLECTED,      /* the weights are on disk */
    JOB_EVENT_COLLECT_FAILED, /* they could not be fetched or written */
    JOB_EVENT_STOP,           /* a client asks for it */
    JOB_EVENT_FAILED,     /* a node reported that it cannot go on, a worker was lost, or the job cannot be carried on */
    JOB_EVENT_SHARD_LOST, /* and with it a part of the weights */
    JOB_EVENT_DEADLINE,   /* what the phase waits for has not come in time */
    JOB_EVENT_RESTARTED,  /* the coordinator was, and found the job in its store in this phase */
    JOB_EVENTS,
};

/* What to do on entering the new phase, in this order. */
enum job_action {
    JOB_ACT_CANCEL_COLLECT = 1 << 0,
    JOB_ACT_OPEN_SHARDS = 1 << 1,
    JOB_ACT_ASSIGN_WORKERS = 1 << 2,
    JOB_ACT_END_WORKERS = 1 << 3, /* EndJob to those that have not been told */
    JOB_ACT_COLLECT = 1 << 4,
    JOB_ACT_END_NODES = 1 << 5,  /* EndJob to every node that has not been told; they are free once they answer Ended */
    JOB_ACT_SET_REASON = 1 << 6, /* the event's reason becomes the job's */
    JOB_ACT_ADD_REASON = 1 << 7, /* the event's reason goes behind the job's */
    JOB_ACT_LEAD_REASON = 1 << 8, /* the event's reason goes before the job's */
};

struct job_transition {
    enum job_phase phase;
    unsigned actions; /* of job_action */
};

/* The event may come in any phase; one that means nothing there changes nothing (the same phase, no action). */
struct job_transition job_next(enum job_phase phase, enum job_event event);

/* What clients see. */
Tally__V1__JobState job_phase_state(enum job_phase phase);
/* The phase in which a job of this state is taken from the store; JOB_FAILED for a state that is not known. */
enum job_phase job_phase_of_state(Tally__V1__JobState state);
bool job_phase_is_terminal(enum job_phase phase);
/* From a gang's forming to its end: nodes work for the job. */
bool job_phase_has_gang(enum job_phase phase);
/* How long a phase may wait for what it waits for. */
enum job_patience {
    JOB_WAITS_ON,        /* as long as it takes, or somebody else watches over it */
    JOB_WAITS_FOR_START, /* TALLY_START_TIMEOUT_MS */
    JOB_WAITS_FOR_END,   /* TALLY_END_TIMEOUT_MS */
};
enum job_patience job_phase_patience(enum job_phase phase);

/* "opening", "deadline": static strings. */
const char *job_phase_text(enum job_phase phase);
const char *job_event_text(enum job_event event);
#endif
