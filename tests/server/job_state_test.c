#include "server/job_state.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Every (phase, event) pair, as one line: what it was meant to be is written out once more here, on purpose. "." stands
 * for nothing. */
struct row {
    enum job_phase phase;
    const char *next[JOB_EVENTS];
};

/* In the order of enum job_event:       gang       opened       started     trained       drained   collected collect
   failed stop                   failed                lost      deadline              restarted */
static const struct row rows[JOB_PHASES] = {
    {JOB_QUEUED, {"opening", ".", ".", ".", ".", ".", ".", "stopped", "failed", ".", ".", "."}},
    {JOB_OPENING, {".", "assigning", ".", ".", ".", ".", ".", "stopped", "failed", "failed", "failed", "failed"}},
    {JOB_ASSIGNING,
     {".", ".", "training", ".", ".", ".", ".", "draining for a stop", "draining after a failure", "failed",
      "draining after a failure", "failed"}},
    {JOB_TRAINING,
     {".", ".", ".", "collecting", ".", ".", ".", "draining for a stop", "draining after a failure", "failed",
      "draining after a failure", "failed"}},
    {JOB_COLLECTING, {".", ".", ".", ".", ".", "succeeded", "failed", ".", ".", "failed", ".", "failed"}},
    {JOB_STOP_DRAINING,
     {".", ".", ".", ".", "keeping the weights for a stop", ".", ".", ".", ".", "failed",
      "keeping the weights for a stop", "failed"}},
    {JOB_STOP_KEEPING, {".", ".", ".", ".", ".", "stopped", "failed", ".", ".", "failed", ".", "failed"}},
    {JOB_FAIL_DRAINING,
     {".", ".", ".", ".", "keeping the weights after a failure", ".", ".", ".", ".", "failed",
      "keeping the weights after a failure", "failed"}},
    {JOB_FAIL_KEEPING, {".", ".", ".", ".", ".", "failed", "failed", ".", ".", "failed", ".", "failed"}},
    {JOB_SUCCEEDED, {".", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", "."}},
    {JOB_FAILED, {".", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", "."}},
    {JOB_STOPPED, {".", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", "."}},
};

static void every_pair_leads_where_it_should(void **state)
{
    (void)state;
    for (int p = 0; p < JOB_PHASES; p++) {
        assert_int_equal(rows[p].phase, p);
        for (int e = 0; e < JOB_EVENTS; e++) {
            struct job_transition got = job_next((enum job_phase)p, (enum job_event)e);
            if (strcmp(rows[p].next[e], ".") == 0) {
                assert_int_equal(got.phase, p);
                assert_int_equal(got.actions, 0);
                continue;
            }
            if (strcmp(job_phase_text(got.phase), rows[p].next[e]) != 0)
                fail_msg("%s + %s leads to %s, not to %s", job_phase_text((enum job_phase)p),
                         job_event_text((enum job_event)e), job_phase_text(got.phase), rows[p].next[e]);
        }
    }
}

static void actions_follow_from_the_phases(void **state)
{
    (void)state;
    for (int p = 0; p < JOB_PHASES; p++) {
        for (int e = 0; e < JOB_EVENTS; e++) {
            enum job_phase from = (enum job_phase)p;
            struct job_transition to = job_next(from, (enum job_event)e);
            if (to.phase == from)
                continue;
            bool collects = to.phase == JOB_COLLECTING || to.phase == JOB_STOP_KEEPING || to.phase == JOB_FAIL_KEEPING;
            bool collected = from == JOB_COLLECTING || from == JOB_STOP_KEEPING || from == JOB_FAIL_KEEPING;
            bool drains = to.phase == JOB_STOP_DRAINING || to.phase == JOB_FAIL_DRAINING;
            assert_int_equal(!!(to.actions & JOB_ACT_OPEN_SHARDS), to.phase == JOB_OPENING);
            assert_int_equal(!!(to.actions & JOB_ACT_ASSIGN_WORKERS), to.phase == JOB_ASSIGNING);
            assert_int_equal(!!(to.actions & JOB_ACT_COLLECT), collects);
            assert_int_equal(!!(to.actions & JOB_ACT_END_WORKERS), drains);
            /* A gang is let go exactly when the job ends (after a restart there is none). */
            assert_int_equal(!!(to.actions & JOB_ACT_END_NODES),
                             job_phase_has_gang(from) && job_phase_is_terminal(to.phase) && e != JOB_EVENT_RESTARTED);
            /* A collection that goes on is called off. */
            assert_int_equal(!!(to.actions & JOB_ACT_CANCEL_COLLECT), collected && e == JOB_EVENT_SHARD_LOST);
            /* A reason is never overwritten by what a failure draws behind it. */
            if (from == JOB_FAIL_DRAINING || from == JOB_FAIL_KEEPING)
                assert_false(to.actions & JOB_ACT_SET_REASON);
            unsigned reasons = to.actions & (JOB_ACT_SET_REASON | JOB_ACT_ADD_REASON | JOB_ACT_LEAD_REASON);
            assert_int_equal(reasons & (reasons - 1), 0);
        }
    }
}

/* From every phase that is not the end, the end is reached whatever gets stuck: each wait has a deadline, a collection
 * that ends by itself, or is one that may last (the queue, training). */
static void no_phase_is_a_trap(void **state)
{
    (void)state;
    for (int p = 0; p < JOB_PHASES; p++) {
        enum job_phase phase = (enum job_phase)p;
        bool collects = phase == JOB_COLLECTING || phase == JOB_STOP_KEEPING || phase == JOB_FAIL_KEEPING;
        bool may_last = phase == JOB_QUEUED || phase == JOB_TRAINING || job_phase_is_terminal(phase);
        assert_int_equal(job_phase_patience(phase) != JOB_WAITS_ON, !collects && !may_last);
        if (job_phase_patience(phase) != JOB_WAITS_ON)
            assert_int_not_equal(job_next(phase, JOB_EVENT_DEADLINE).phase, phase);
        if (collects) {
            assert_true(job_phase_is_terminal(job_next(phase, JOB_EVENT_COLLECTED).phase));
            assert_true(job_phase_is_terminal(job_next(phase, JOB_EVENT_COLLECT_FAILED).phase));
        }
    }
}

static void clients_see_states(void **state)
{
    (void)state;
    static const Tally__V1__JobState seen[JOB_PHASES] = {
        TALLY__V1__JOB_STATE__QUEUED,    TALLY__V1__JOB_STATE__STARTING, TALLY__V1__JOB_STATE__STARTING,
        TALLY__V1__JOB_STATE__RUNNING,   TALLY__V1__JOB_STATE__RUNNING,  TALLY__V1__JOB_STATE__STOPPING,
        TALLY__V1__JOB_STATE__STOPPING,  TALLY__V1__JOB_STATE__STOPPING, TALLY__V1__JOB_STATE__STOPPING,
        TALLY__V1__JOB_STATE__SUCCEEDED, TALLY__V1__JOB_STATE__FAILED,   TALLY__V1__JOB_STATE__STOPPED,
    };
    for (int p = 0; p < JOB_PHASES; p++) {
        enum job_phase phase = (enum job_phase)p;
        assert_int_equal(job_phase_state(phase), seen[p]);
        assert_int_equal(job_phase_has_gang(phase), p > JOB_QUEUED && p < JOB_SUCCEEDED);
        assert_int_equal(
            job_phase_of_state(seen[p]) == phase || job_phase_state(job_phase_of_state(seen[p])) == seen[p], 1);
    }
    assert_int_equal(job_phase_of_state((Tally__V1__JobState)99), JOB_FAILED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_pair_leads_where_it_should),
        cmocka_unit_test(actions_follow_from_the_phases),
        cmocka_unit_test(no_phase_is_a_trap),
        cmocka_unit_test(clients_see_states),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
