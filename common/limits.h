#ifndef COMMON_LIMITS_H
#define COMMON_LIMITS_H
/* Every bound of the system, each with its reason. */

/* Protocol version (proto/jobs.proto, Version). A peer of another major is refused; a minor only adds fields. */
#define TALLY_PROTOCOL_MAJOR 1
#define TALLY_PROTOCOL_MINOR 0

/* A log line is one write(2): PIPE_BUF keeps lines of several processes whole on one pipe. */
#define TALLY_LOG_LINE_MAX 4096

/* A slice of the parameter vector: large enough that a message's fixed cost is hidden, small enough that sending
 * overlaps computing. */
#define TALLY_SLICE_MAX_BYTES (1u << 20)

/* An RPC message: a slice and its header, with room; what is larger is refused before it is buffered. */
#define TALLY_MESSAGE_MAX_BYTES (4u << 20)

/* What one RPC message may take once it is unpacked: an empty submessage is 2 bytes on the wire and some 50 in memory.
 */
#define TALLY_UNPACK_MAX_BYTES (64u << 20)

/* A job file: the largest honest ones (thousands of layers) are far below. */
#define TALLY_JOB_FILE_MAX_BYTES (16u << 20)

/* Values in a job file, and how deep they nest: JobSpec needs eight levels, and whoever walks a document recurses once
 * a level. */
#define TALLY_SPEC_VALUES_MAX (1u << 18)
#define TALLY_SPEC_DEPTH_MAX 32

/* A job's or a layer's name: it becomes part of file names (255 bytes) and of parameters' names. */
#define TALLY_NAME_MAX 200

/* Micro-batches in a step: a step's tree is walked with 32-bit leaves, and its depth bounds a worker's buffers. */
#define TALLY_MICRO_BATCHES_MAX (1u << 16)

/* Elements of one sample, or of one parameter: products of dimensions stay far inside size_t, and every byte count
 * inside int64. */
#define TALLY_ELEMENTS_MAX ((size_t)1 << 40)

/* A safetensors header, as the format's own reader limits it. */
#define TALLY_SAFETENSORS_HEADER_MAX_BYTES (100u << 20)

/* sockaddr_un.sun_path, with its terminating zero. */
#define TALLY_UNIX_PATH_MAX 108

/* A node that is not heard of for so long is lost; it beats three times as often. */
#define TALLY_LEASE_MS 10000

/* The first weights of the largest models take a while to make or read; then workers open (and decode) their data. */
#define TALLY_START_TIMEOUT_MS 120000

/* A node that was told to drop a job does so between two micro-batches; what takes longer is not waited for. */
#define TALLY_END_TIMEOUT_MS 10000

/* All workers have finished: the last reports are on their way, at most a report interval and a round trip behind. */
#define TALLY_LAST_REPORTS_TIMEOUT_MS 30000

/* A shard that sends nothing for so long while its weights are fetched is given up. */
#define TALLY_FETCH_TIMEOUT_MS 30000

/* Jobs that one coordinator keeps, ended ones too, and of these such as have not ended. A job's record takes about 1
 * KiB of memory, and a list of all fits a message. */
#define TALLY_JOBS_MAX 10000
#define TALLY_JOBS_LIVE_MAX 1000

/* A packed job spec: it travels inside messages that add little to it. */
#define TALLY_SPEC_MAX_BYTES (3u << 20)

/* Workers and shards of one coordinator: each holds a stream and beats three times a lease. */
#define TALLY_NODES_MAX 4096

/* A node's name, address and activity, and a request's id, as the coordinator keeps them. */
#define TALLY_NODE_NAME_MAX 64
#define TALLY_NODE_ADDRESS_MAX 256
#define TALLY_ACTIVITY_MAX 256
#define TALLY_REQUEST_ID_MAX 64

/* Streams that watch one coordinator's jobs, and result files being sent: each holds up to a megabyte of queued
 * messages. */
#define TALLY_WATCHERS_MAX 256
#define TALLY_DOWNLOADS_MAX 32

/* Who watches a job or takes a result and reads nothing for so long while something waits for it gives its place up: it
 * can go on later where it was. */
#define TALLY_READER_TIMEOUT_MS 60000

/* Events that travel and are stored as one piece; several make a message. */
#define TALLY_EVENT_BATCH_MAX_BYTES (256u << 10)

/* Events of a job that are kept in memory behind the newest for its watchers; who is further behind reads the store. */
#define TALLY_EVENT_TAIL_BYTES (512u << 10)

/* What may wait for the store's disk: more than ten seconds of the fastest job's events. Beyond it the disk is taken
 * for stuck. */
#define TALLY_STORE_QUEUE_BYTES (64u << 20)

/* Results of evaluations under way that the coordinator holds for one job. */
#define TALLY_EVAL_PENDING_BYTES (128u << 20)

#endif
