#include <paceline.h>
#include <stdio.h>

int main(int count, char **words) {
    paceline_options options = {0};
    paceline_box *box = NULL;
    paceline_region *region = NULL;
    paceline_key key;
    float gradient[3] = {1, 2, 3}, sum[3];
    uint64_t version = 0;
    /* Without a token file, the user's own. */
    options.token_file = count > 2 ? words[2] : NULL;
    int failed = paceline_connect(count > 1 ? words[1] : "127.0.0.1:29411", &options, &box)
        || paceline_key_derive(box, "sums", &key)
        || (paceline_create(box, &key, sizeof sum, &region) && paceline_attach(box, &key, sizeof sum, &region))
        || paceline_add(region, 0, gradient, 3, 0.5f, NULL)
        || paceline_read(region, 0, sum, sizeof sum, &version);
    if (failed)
        fprintf(stderr, "error: %s\n", paceline_error());
    else
        printf("%g %g %g, version %d\n", sum[0], sum[1], sum[2], (int)version);
    paceline_region_close(region);
    paceline_close(box);
    return failed;
}
