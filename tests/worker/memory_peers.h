#ifndef TESTS_WORKER_MEMORY_PEERS_H
#define TESTS_WORKER_MEMORY_PEERS_H
/*
 * Peers in one process, for tests: each rank on a thread of its own. What is sent stays in the sender's memory until
 * the receiver takes it or the sender's flush asks for the memory back, whichever comes first: who writes to it too
 * early sends something else.
 */
#include "model/plan.h"
#include "worker/peers.h"

struct memory_peers;

struct memory_peers_options {
    int64_t wait_ms;  /* for a tensor, or room; 0: 20 s */
    uint32_t surplus; /* room beyond plan_peer_room */
};

/* plans: of all ranks, by rank; lent. */
tally_status memory_peers_open(struct plan *const *plans, uint32_t ranks, const struct memory_peers_options *options,
                               struct memory_peers **ret_peers, struct tally_error *err);
void memory_peers_close(struct memory_peers *peers);

/* What that rank uses. */
struct peers *memory_peers_of(struct memory_peers *peers, uint32_t rank);

/* Tensors sent, and their bytes. */
uint64_t memory_peers_sent(const struct memory_peers *peers, uint64_t *ret_bytes);
/* From now on every send, receive and flush fails with TALLY_EUNAVAIL: a rank is gone. */
void memory_peers_break(struct memory_peers *peers);
#endif
