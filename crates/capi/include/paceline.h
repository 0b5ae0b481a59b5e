/* The memory box of Paceline, for programs in C: memory that a server lends to processes of its own and of other hosts.
 * docs/memory_box.md says what it is and how to start one (`paceline serve memory`).
 *
 *     cargo build --release -p paceline-capi
 *     cc program.c -I crates/capi/include -L target/release -lpaceline_c -lpthread -ldl -lm
 *
 * Every function but paceline_error returns a status, 0 if it is done. What it was to tell is then there; if it was not
 * done, handles are NULL and other results as they were before. Results that are numbers may be NULL where nobody wants to know them, except where
 * a function has only one.
 *
 * Threads may share a box and its regions; who closes a handle must be the last one who uses it. On a box that is mapped,
 * calls are made one after the other: give a thread that waits for versions a box of its own.
 */
#ifndef PACELINE_H
#define PACELINE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a function returns. */
enum paceline_status {
    PACELINE_OK = 0,      /* it is done */
    PACELINE_INVALID = 1, /* an argument cannot be: NULL, no token, not inside of the region */
    PACELINE_REFUSED = 2, /* the box says no: another token, full, a quota */
    PACELINE_UNKNOWN = 3, /* no region is open to this key */
    PACELINE_TAKEN = 4,   /* a region of this name is there already */
    PACELINE_LOST = 5,    /* the box cannot be reached, or is gone */
    PACELINE_LATE = 6,    /* time is over */
    PACELINE_BUG = 7      /* Paceline has made a mistake */
};

/* One box, or several that are used as one. */
typedef struct paceline_box paceline_box;

/* A region of it. */
typedef struct paceline_region paceline_region;

/* How to reach a box. All zeros, or NULL instead, is what a box expects that was started without flags. */
typedef struct paceline_options {
    const char *token;      /* 64 hexadecimal digits, or NULL: */
    const char *token_file; /* a file that has them, which only its owner can read, or NULL: the file that PACELINE_TOKEN_FILE names, or the user's own */
    uint32_t sockets;       /* connections between which long data is divided, up to 64; 0 is one */
    uint8_t tls;            /* not 0: encrypted, as `paceline serve memory --tls` */
    uint8_t unmapped;       /* not 0: by sockets even on the same host */
} paceline_options;

/* By which a region is found, and what opens it. */
typedef struct paceline_key {
    uint8_t name[32];
    uint8_t secret[16];
} paceline_key;

/* What is lent. */
typedef struct paceline_usage_info {
    uint64_t regions;
    uint64_t clients;
    uint64_t used;      /* bytes */
    uint64_t bytes_max; /* bytes that may be */
} paceline_usage_info;

/* Why the last call of this thread was not done, as a sentence; "" if it was. It is there until the thread's next call. */
const char *paceline_error(void);

/* Reaches a box at "host:port", or several with commas between them, which everybody names in the same order. */
int paceline_connect(const char *addresses, const paceline_options *options, paceline_box **box);

/* Lets go of a box, whose connections end when its regions are closed too. NULL is nothing to do. */
int paceline_close(paceline_box *box);

/* Whether the box's memory is mapped, because it is on this host: 0 or 1. */
int paceline_is_mapped(const paceline_box *box, int *is_mapped);

/* What is lent; of several boxes, together. */
int paceline_usage(const paceline_box *box, paceline_usage_info *usage);

/* The key of a name, for all who hold the token. */
int paceline_key_derive(const paceline_box *box, const char *name, paceline_key *key);

/* The key of a name with an access token of one's own, for those who are told it. */
int paceline_key_named(const char *name, const uint8_t secret[16], paceline_key *key);

/* Makes a region full of zeros. It is there until it is freed, or the last client that has it is gone. */
int paceline_create(const paceline_box *box, const paceline_key *key, uint64_t bytes, paceline_region **region);

/* The same; it stays until it is freed. */
int paceline_create_kept(const paceline_box *box, const paceline_key *key, uint64_t bytes, paceline_region **region);

/* Finds a region. 0 bytes: as long as it is, which of several boxes has to be said if it is shorter than their stripes of 1 MB. */
int paceline_attach(const paceline_box *box, const paceline_key *key, uint64_t bytes, paceline_region **region);

/* Takes a region's key away and gives its memory back once nobody looks at it. The handle is still to be closed. */
int paceline_free(const paceline_region *region);

/* Lets go of a handle; the region stays. NULL is nothing to do. */
int paceline_region_close(paceline_region *region);

/* A region's length. */
int paceline_bytes(const paceline_region *region, uint64_t *bytes);

/* Reads bytes as they were at one version, which is told. Of several boxes, versions are those of the first, 0 if it has none of
 * the bytes, and each stripe of 1 MB is of a version of its own. */
int paceline_read(const paceline_region *region, uint64_t at, void *into, uint64_t bytes, uint64_t *version);

/* Replaces bytes: readers see all of them or none. The version with which they are there. */
int paceline_write(const paceline_region *region, uint64_t at, const void *from, uint64_t bytes, uint64_t *version);

/* Adds numbers, times a factor, to those at a place (in bytes, a multiple of 4): nobody's additions are lost. */
int paceline_add(const paceline_region *region, uint64_t at, const float *numbers, uint64_t count, float scale, uint64_t *version);

/* Has the box add bytes of one region, as float and times a factor, to those at the same place of another. */
int paceline_accumulate(const paceline_region *target, const paceline_region *source, uint64_t at, uint64_t bytes, float scale, uint64_t *version);

/* Adds to an int64_t at a place (a multiple of 8), and tells what it was. */
int paceline_fetch_add(const paceline_region *region, uint64_t at, int64_t by, int64_t *before);

/* A new version without a change, for those who wait for one. Of several boxes, the first's. */
int paceline_notify(const paceline_region *region, uint64_t *version);

/* Waits until the region has this version, at most so many milliseconds (UINT64_MAX: for ever); PACELINE_LATE if it has not.
 * The version that it has then is told in both cases. */
int paceline_wait(const paceline_region *region, uint64_t version, uint64_t limit_ms, uint64_t *found);

#ifdef __cplusplus
}
#endif

#endif
