#ifndef SERVER_MAIN_H
#define SERVER_MAIN_H
/* The roles of tally-server. argv[0] is the role's name. Each returns the process's exit code: 0 after a clean end, 1
 * when it could not start or go on (with one sentence on stderr), 2 on wrong usage. */
int coordinator_main(int argc, char **argv);
int shard_main(int argc, char **argv);
#endif
