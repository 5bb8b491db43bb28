/* tally-server: one binary for the two roles of the server. */
#include "server/main.h"

#include <stdio.h>
#include <string.h>

#include "common/version.h"

static void print_help(FILE *to)
{
    fprintf(to, "tally-server coordinator ...   owns jobs, membership and gangs\n"
                "tally-server shard ...         owns a part of the parameters\n"
                "Each of them tells its options with --help.\n");
}

int main(int argc, char **argv)
{
    const char *role = argc > 1 ? argv[1] : "";
    if (strcmp(role, "coordinator") == 0)
        return coordinator_main(argc - 1, argv + 1);
    if (strcmp(role, "shard") == 0)
        return shard_main(argc - 1, argv + 1);
    if (strcmp(role, "--version") == 0) {
        printf("tally-server %s\n", TALLY_VERSION);
        return 0;
    }
    if (strcmp(role, "--help") == 0 || strcmp(role, "-h") == 0) {
        print_help(stdout);
        return 0;
    }
    if (role[0])
        fprintf(stderr, "tally-server: unknown role '%s': expected coordinator or shard\n", role);
    else
        print_help(stderr);
    return 2;
}
