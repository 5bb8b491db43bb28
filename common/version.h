#ifndef COMMON_VERSION_H
#define COMMON_VERSION_H
#define TALLY_VERSION "0.1.0"
#endif
