/* What a program in C does with a memory box: every function of the header, by every way, and what it is told when it is wrong.
 *
 *     box WAY ADDRESSES TOKEN TOKEN_FILE NAME
 *
 * The ways are those of tests/programs.rs, which starts the boxes. */
#include <paceline.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MB (1u << 20)

_Static_assert(sizeof(paceline_key) == 48, "as calls.rs has it");
_Static_assert(sizeof(paceline_usage_info) == 32, "as calls.rs has it");
_Static_assert(sizeof(paceline_options) == 2 * sizeof(char *) + 8, "as calls.rs has it");

static void check_at(int holds, const char *what, int line) {
    if (!holds) {
        fprintf(stderr, "box.c:%d: %s (%s)\n", line, what, paceline_error());
        exit(1);
    }
}

#define CHECK(what) check_at((what), #what, __LINE__)
#define DONE(call) CHECK((call) == PACELINE_OK && !*paceline_error())
#define SAYS(status, call) CHECK((call) == (status) && *paceline_error())

static const char *way, *addresses, *token, *token_file, *name;

static int is(const char *which) {
    return strcmp(way, which) == 0;
}

static paceline_options options(void) {
    paceline_options options = {0};
    options.token = token;
    if (is("file")) {
        options.token = NULL;
        options.token_file = token_file;
    }
    options.tls = is("tls") || is("gone-tls");
    options.unmapped = !is("mapped") && !is("gone-mapped") && !is("second");
    options.sockets = is("sockets") ? 3 : 0;
    return options;
}

static paceline_box *reach(void) {
    paceline_options how = options();
    paceline_box *box = NULL;
    int is_mapped = -1;
    DONE(paceline_connect(addresses, &how, &box));
    CHECK(box != NULL);
    DONE(paceline_is_mapped(box, &is_mapped));
    CHECK(is_mapped == !how.unmapped);
    return box;
}

static paceline_key key_of(paceline_box *box, const char *what) {
    char whole[200];
    paceline_key key;
    snprintf(whole, sizeof whole, "%s %s", name, what);
    DONE(paceline_key_derive(box, whole, &key));
    return key;
}

static void *have(size_t bytes) {
    void *memory = malloc(bytes);
    CHECK(memory != NULL);
    return memory;
}

static int says(const char *words) {
    return strstr(paceline_error(), words) != NULL;
}

/* Written by one and read by another, short and long, at odd places. */
static void reads_and_writes(paceline_box *one, paceline_box *other) {
    const size_t length = 5 * MB + 12345;
    const struct { uint64_t at, bytes; } pieces[] = {
        {0, length}, {1, 1}, {65535, 2}, {70000, 300000}, {length - 1, 1}, {MB - 3, 3 * MB + 7},
    };
    paceline_key key = key_of(one, "bytes");
    paceline_region *region = NULL, *seen = NULL;
    unsigned char *model = have(length), *found = have(length);
    uint64_t bytes = 0;
    DONE(paceline_create(one, &key, length, &region));
    DONE(paceline_attach(other, &key, 0, &seen));
    DONE(paceline_bytes(seen, &bytes));
    CHECK(bytes == length);
    memset(model, 0, length);
    memset(found, 1, length);
    DONE(paceline_read(seen, 0, found, length, NULL));
    CHECK(memcmp(model, found, length) == 0);
    for (size_t nth = 0; nth < sizeof pieces / sizeof *pieces; nth++) {
        uint64_t at = pieces[nth].at, count = pieces[nth].bytes, written = 0, read = 0;
        for (uint64_t i = 0; i < count; i++)
            model[at + i] = (unsigned char)((i * 2654435761u >> 7) + nth);
        DONE(paceline_write(region, at, model + at, count, &written));
        DONE(paceline_read(seen, 0, found, length, &read));
        CHECK(memcmp(model, found, length) == 0);
        CHECK(is("several") || (written == nth + 1 && read == written));
        memset(found, 0, count);
        DONE(paceline_read(seen, at, found, count, NULL));
        CHECK(memcmp(model + at, found, count) == 0);
    }
    DONE(paceline_free(region));
    SAYS(PACELINE_UNKNOWN, paceline_free(seen));
    SAYS(PACELINE_UNKNOWN, paceline_attach(other, &key, 0, &(paceline_region *){NULL}));
    DONE(paceline_region_close(region));
    DONE(paceline_region_close(seen));
    free(model);
    free(found);
}

/* Sums that the box makes. */
static void numbers(paceline_box *one, paceline_box *other) {
    const size_t count = MB / 2 + 77;
    const uint64_t bytes = count * sizeof(float);
    paceline_key key = key_of(one, "sums"), more = key_of(one, "more");
    paceline_region *sums = NULL, *seen = NULL, *delta = NULL;
    float *values = have(bytes), *found = have(bytes);
    uint64_t version = 0;
    for (size_t i = 0; i < count; i++)
        values[i] = (float)(i % 1000);
    DONE(paceline_create(one, &key, bytes, &sums));
    DONE(paceline_attach(other, &key, bytes, &seen));
    DONE(paceline_create(one, &more, bytes, &delta));
    DONE(paceline_add(sums, 0, values, count, 1, NULL));
    DONE(paceline_add(seen, 0, values, count, 0.5f, &version));
    CHECK(version > 0);
    DONE(paceline_add(seen, 4, values, 2, 1, NULL));
    DONE(paceline_write(delta, 0, values, bytes, NULL));
    DONE(paceline_accumulate(sums, delta, 0, bytes, -1, NULL));
    DONE(paceline_accumulate(sums, delta, MB - 8, 16, 2, &version));
    DONE(paceline_read(seen, 0, found, bytes, NULL));
    for (size_t i = 0; i < count; i++) {
        double wanted = 0.5 * values[i];
        if (i == 1 || i == 2)
            wanted += values[i - 1];
        if (i >= (MB - 8) / 4 && i < (MB + 8) / 4)
            wanted += 2 * values[i];
        CHECK(fabs(found[i] - wanted) < 1e-3);
    }
    SAYS(PACELINE_INVALID, paceline_accumulate(sums, seen, 0, bytes, 1, NULL));
    CHECK(says("not of one connection"));
    DONE(paceline_free(sums));
    DONE(paceline_free(delta));
    DONE(paceline_region_close(sums));
    DONE(paceline_region_close(seen));
    DONE(paceline_region_close(delta));
    free(values);
    free(found);
}

static void counts_and_waits(paceline_box *one, paceline_box *other) {
    paceline_key key = key_of(one, "count");
    paceline_region *region = NULL, *seen = NULL;
    paceline_usage_info usage;
    int64_t before = -1, place = 3 * (int64_t)MB + 8, found = 0;
    uint64_t version = 0, now = 77;
    DONE(paceline_create(one, &key, 4 * MB, &region));
    DONE(paceline_attach(other, &key, 4 * MB, &seen));
    for (int nth = 0; nth < 5; nth++) {
        DONE(paceline_fetch_add(nth % 2 ? region : seen, (uint64_t)place, -7, &before));
        CHECK(before == -7 * nth);
    }
    DONE(paceline_fetch_add(seen, (uint64_t)place, INT64_MAX, NULL));
    DONE(paceline_read(region, (uint64_t)place, &found, sizeof found, NULL));
    CHECK(found == INT64_MAX - 35);
    DONE(paceline_notify(region, &version));
    DONE(paceline_wait(seen, version, 0, &now));
    CHECK(now == version);
    SAYS(PACELINE_LATE, paceline_wait(seen, version + 1, 20, &now));
    CHECK(now == version && says("still at version"));
    DONE(paceline_notify(region, NULL));
    DONE(paceline_wait(seen, version + 1, UINT64_MAX, NULL));
    DONE(paceline_usage(other, &usage));
    CHECK(usage.regions >= 1 && usage.clients >= 2 && usage.used >= 4 * MB && usage.bytes_max > usage.used);
    DONE(paceline_free(seen));
    DONE(paceline_region_close(seen));
    DONE(paceline_region_close(region));
}

/* A region keeps its box reached; what nobody has any more is gone, unless it is kept. */
static void lives(void) {
    paceline_box *one = reach(), *other = reach();
    paceline_key passing = key_of(one, "passing"), kept, wrong;
    paceline_region *region = NULL, *stays = NULL, *found = NULL;
    const uint8_t secret[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, others[16] = {0};
    paceline_usage_info before, after;
    char word[6];
    DONE(paceline_usage(other, &before));
    DONE(paceline_key_named(name, secret, &kept));
    DONE(paceline_key_named(name, others, &wrong));
    CHECK(memcmp(kept.name, wrong.name, 32) == 0 && memcmp(kept.secret, secret, 16) == 0);
    DONE(paceline_create(one, &passing, 100, &region));
    DONE(paceline_create_kept(one, &kept, 100, &stays));
    DONE(paceline_write(stays, 3, "hello", 6, NULL));
    SAYS(PACELINE_TAKEN, paceline_create(other, &kept, 100, &found));
    CHECK(found == NULL && says("there already"));
    SAYS(PACELINE_UNKNOWN, paceline_attach(other, &wrong, 100, &found));
    SAYS(PACELINE_REFUSED, paceline_attach(other, &kept, 101, &found));
    DONE(paceline_close(one));
    DONE(paceline_write(region, 0, "still", 6, NULL));
    DONE(paceline_region_close(region));
    DONE(paceline_region_close(stays));
    DONE(paceline_attach(other, &kept, 100, &found));
    DONE(paceline_read(found, 3, word, 6, NULL));
    CHECK(strcmp(word, "hello") == 0);
    DONE(paceline_free(found));
    DONE(paceline_region_close(found));
    /* The box hears of an end from the system, not at once. */
    do
        DONE(paceline_usage(other, &after));
    while (after.clients >= before.clients);
    SAYS(PACELINE_UNKNOWN, paceline_attach(other, &passing, 100, &found));
    DONE(paceline_close(other));
}

/* What cannot be is told, and nothing happens. */
static void refusals(paceline_box *box) {
    paceline_key key = key_of(box, "refusals");
    paceline_region *region = NULL, *none = NULL;
    paceline_box *nobody = (paceline_box *)&key;
    paceline_options how = options();
    unsigned char bytes[64] = {0};
    _Alignas(float) unsigned char askew[12] = {0};
    const uint64_t long_ones[] = {65, UINT64_MAX, UINT64_MAX - 7, (uint64_t)INT64_MAX + 1};
    uint64_t number = 5;

    SAYS(PACELINE_INVALID, paceline_connect(NULL, &how, &nobody));
    CHECK(nobody == NULL);
    SAYS(PACELINE_INVALID, paceline_connect(addresses, &how, NULL));
    SAYS(PACELINE_INVALID, paceline_connect("", &how, &nobody));
    SAYS(PACELINE_INVALID, paceline_connect("127.0.0.1", &how, &nobody));
    SAYS(PACELINE_INVALID, paceline_connect("127.0.0.1:1,", &how, &nobody));
    SAYS(PACELINE_INVALID, paceline_connect("\xff:1", &how, &nobody));
    SAYS(PACELINE_LOST, paceline_connect("127.0.0.1:1", &how, &nobody));
    how.sockets = 65;
    SAYS(PACELINE_INVALID, paceline_connect(addresses, &how, &nobody));
    how.sockets = 0;
    how.token = "swordfish";
    SAYS(PACELINE_INVALID, paceline_connect(addresses, &how, &nobody));
    CHECK(says("64 hexadecimal digits") && !says("swordfish"));
    how.token = "0000000000000000000000000000000000000000000000000000000000000000";
    SAYS(PACELINE_REFUSED, paceline_connect(addresses, &how, &nobody));
    how.token = NULL;
    how.token_file = "no/such/file";
    SAYS(PACELINE_INVALID, paceline_connect(addresses, &how, &nobody));
    CHECK(nobody == NULL && says("no/such/file"));

    DONE(paceline_close(NULL));
    DONE(paceline_region_close(NULL));
    SAYS(PACELINE_INVALID, paceline_is_mapped(NULL, &(int){0}));
    SAYS(PACELINE_INVALID, paceline_is_mapped(box, NULL));
    SAYS(PACELINE_INVALID, paceline_usage(NULL, &(paceline_usage_info){0}));
    SAYS(PACELINE_INVALID, paceline_usage(box, NULL));
    SAYS(PACELINE_INVALID, paceline_key_derive(NULL, "a", &key));
    SAYS(PACELINE_INVALID, paceline_key_derive(box, NULL, &key));
    SAYS(PACELINE_INVALID, paceline_key_derive(box, "a", NULL));
    SAYS(PACELINE_INVALID, paceline_key_named(NULL, bytes, &key));
    SAYS(PACELINE_INVALID, paceline_key_named("a", NULL, &key));
    SAYS(PACELINE_INVALID, paceline_key_named("a", bytes, NULL));
    SAYS(PACELINE_INVALID, paceline_create(NULL, &key, 8, &none));
    SAYS(PACELINE_INVALID, paceline_create(box, NULL, 8, &none));
    SAYS(PACELINE_INVALID, paceline_create(box, &key, 8, NULL));
    SAYS(PACELINE_INVALID, paceline_create(box, &key, 0, &none));
    SAYS(PACELINE_INVALID, paceline_create_kept(box, &key, 0, &none));
    SAYS(PACELINE_REFUSED, paceline_create(box, &key, 1ull << 40, &none));
    SAYS(PACELINE_REFUSED, paceline_create(box, &key, UINT64_MAX, &none));
    SAYS(PACELINE_UNKNOWN, paceline_attach(box, &key, UINT64_MAX, &none));
    SAYS(PACELINE_INVALID, paceline_attach(box, NULL, 0, &none));
    CHECK(none == NULL);

    DONE(paceline_create(box, &key, 64, &region));
    SAYS(PACELINE_INVALID, paceline_bytes(NULL, &number));
    SAYS(PACELINE_INVALID, paceline_bytes(region, NULL));
    SAYS(PACELINE_INVALID, paceline_free(NULL));
    SAYS(PACELINE_INVALID, paceline_notify(NULL, NULL));
    SAYS(PACELINE_INVALID, paceline_wait(NULL, 1, 1, NULL));
    SAYS(PACELINE_INVALID, paceline_fetch_add(NULL, 0, 1, NULL));
    SAYS(PACELINE_INVALID, paceline_fetch_add(region, 4, 1, NULL));
    SAYS(PACELINE_INVALID, paceline_fetch_add(region, 64, 1, NULL));
    SAYS(PACELINE_INVALID, paceline_fetch_add(region, UINT64_MAX - 7, 1, NULL));
    SAYS(PACELINE_INVALID, paceline_read(NULL, 0, bytes, 1, NULL));
    SAYS(PACELINE_INVALID, paceline_read(region, 0, NULL, 1, NULL));
    SAYS(PACELINE_INVALID, paceline_read(region, 0, bytes, 0, NULL));
    SAYS(PACELINE_INVALID, paceline_read(region, 64, bytes, 1, &number));
    SAYS(PACELINE_INVALID, paceline_read(region, UINT64_MAX, bytes, 1, &number));
    SAYS(PACELINE_INVALID, paceline_write(NULL, 0, bytes, 1, NULL));
    SAYS(PACELINE_INVALID, paceline_write(region, 0, NULL, 1, NULL));
    SAYS(PACELINE_INVALID, paceline_write(region, 1, bytes, 64, NULL));
    SAYS(PACELINE_INVALID, paceline_add(NULL, 0, (float[1]){0}, 1, 1, NULL));
    SAYS(PACELINE_INVALID, paceline_add(region, 0, NULL, 1, 1, NULL));
    SAYS(PACELINE_INVALID, paceline_add(region, 2, (float[1]){0}, 1, 1, NULL));
    SAYS(PACELINE_INVALID, paceline_add(region, 0, (const float *)(const void *)(askew + 1), 1, 1, NULL));
    CHECK(says("multiple of 4"));
    SAYS(PACELINE_INVALID, paceline_add(region, 0, (float[1]){0}, UINT64_MAX / 4 + 1, 1, NULL));
    SAYS(PACELINE_INVALID, paceline_accumulate(region, NULL, 0, 8, 1, NULL));
    SAYS(PACELINE_INVALID, paceline_accumulate(NULL, region, 0, 8, 1, NULL));
    SAYS(PACELINE_INVALID, paceline_accumulate(region, region, 0, 7, 1, NULL));
    for (size_t nth = 0; nth < sizeof long_ones / sizeof *long_ones; nth++) {
        SAYS(PACELINE_INVALID, paceline_read(region, 0, bytes, long_ones[nth], NULL));
        SAYS(PACELINE_INVALID, paceline_write(region, 0, bytes, long_ones[nth], NULL));
        SAYS(PACELINE_INVALID, paceline_add(region, 0, (float[1]){0}, long_ones[nth], 1, NULL));
        SAYS(PACELINE_INVALID, paceline_accumulate(region, region, 0, long_ones[nth], 1, NULL));
    }
    CHECK(number == 5);
    DONE(paceline_read(region, 0, bytes, 64, &number));
    CHECK(number == 0);
    DONE(paceline_free(region));
    DONE(paceline_region_close(region));
}

/* One process makes and waits, another attaches, looks and answers. */
static void meets(int first) {
    const size_t length = 2 * MB;
    paceline_box *box = reach();
    paceline_key key = key_of(box, "meeting");
    paceline_region *region = NULL;
    unsigned char *bytes = have(length);
    if (first) {
        DONE(paceline_create_kept(box, &key, length, &region));
        memset(bytes, 7, length);
        DONE(paceline_write(region, 0, bytes, length, NULL));
        puts("made");
        fflush(stdout);
        DONE(paceline_wait(region, 3, 60000, NULL));
        DONE(paceline_read(region, 0, bytes, length, NULL));
        CHECK(bytes[0] == 7 && bytes[100] == 9 && bytes[length - 1] == 7);
        DONE(paceline_free(region));
    } else {
        DONE(paceline_attach(box, &key, length, &region));
        DONE(paceline_read(region, 0, bytes, length, NULL));
        for (size_t i = 0; i < length; i++)
            CHECK(bytes[i] == 7);
        DONE(paceline_write(region, 100, "\x09", 1, NULL));
        DONE(paceline_notify(region, NULL));
    }
    DONE(paceline_region_close(region));
    DONE(paceline_close(box));
    free(bytes);
}

/* A box that ends is a status, and no signal. */
static void gone(void) {
    paceline_box *box = reach();
    paceline_key key = key_of(box, "gone");
    paceline_region *region = NULL;
    char *bytes = have(MB);
    memset(bytes, 1, MB);
    DONE(paceline_create(box, &key, MB, &region));
    DONE(paceline_write(region, 0, bytes, MB, NULL));
    puts("made");
    fflush(stdout);
    CHECK(getchar() == 'g');
    /* Its threads may not have heard of it yet. */
    while (paceline_usage(box, &(paceline_usage_info){0}) == PACELINE_OK)
        continue;
    for (int nth = 0; nth < 3; nth++) {
        SAYS(PACELINE_LOST, paceline_write(region, 0, bytes, 8, NULL));
        SAYS(PACELINE_LOST, paceline_read(region, 0, bytes, MB, NULL));
        SAYS(PACELINE_LOST, paceline_usage(box, &(paceline_usage_info){0}));
    }
    DONE(paceline_region_close(region));
    DONE(paceline_close(box));
    free(bytes);
}

int main(int count, char **words) {
    CHECK(count == 6);
    way = words[1], addresses = words[2], token = words[3], token_file = words[4], name = words[5];
    if (is("first") || is("second")) {
        meets(is("first"));
    } else if (strncmp(way, "gone", 4) == 0) {
        gone();
    } else {
        paceline_box *one = reach(), *other = reach();
        reads_and_writes(one, other);
        numbers(one, other);
        counts_and_waits(one, other);
        lives();
        refusals(one);
        DONE(paceline_close(one));
        DONE(paceline_close(other));
    }
    puts("ok");
    return 0;
}
