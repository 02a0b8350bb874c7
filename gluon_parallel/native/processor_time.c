/* Processor time of this process and of those that it has started, without Python's lock: there are many files to read. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "external.h"

typedef struct {
    int number, parent;
    int64_t ticks; /* its own, and those of its children that have ended */
} Process;

/* What /proc says of a process; returns 0 if it has ended. */
static int look(const char *number, Process *found)
{
    char path[32 + sizeof ((struct dirent *)0)->d_name], text[1024];
    snprintf(path, sizeof path, "/proc/%s/stat", number);
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return 0;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    const char *behind_name = strrchr(text, ')'); /* which may have spaces and brackets in it */
    unsigned long times[4];
    found->number = atoi(number);
    if (behind_name == NULL || sscanf(behind_name, ") %*c %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %lu %lu %lu %lu",
                                      &found->parent, times, times + 1, times + 2, times + 3) != 5)
        return 0;
    found->ticks = (int64_t)(times[0] + times[1] + times[2] + times[3]);
    return 1;
}

/* Clock ticks of processor time of this process and of all below it, up to now; -1: /proc cannot be read. */
EXPORT int64_t gp_processor_time(void)
{
    DIR *folder = opendir("/proc");
    Process *all = NULL;
    size_t num = 0, room = 0;
    if (folder == NULL)
        return -1;
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        if (entry->d_name[0] < '0' || entry->d_name[0] > '9')
            continue;
        if (num == room) {
            Process *more = realloc(all, (room = 2 * room + 64) * sizeof *all);
            if (more == NULL)
                break;
            all = more;
        }
        num += look(entry->d_name, &all[num]);
    }
    closedir(folder);
    /* Those that are known to be below come first. */
    int64_t ticks = 0;
    size_t below = 0;
    for (size_t i = 0, self = (size_t)getpid(); i < num; i++)
        if ((size_t)all[i].number == self) {
            Process found = all[i];
            all[i] = all[0], all[0] = found, below = 1;
        }
    for (size_t i = 0; i < below; i++) {
        ticks += all[i].ticks;
        for (size_t j = below; j < num; j++)
            if (all[j].parent == all[i].number) {
                Process found = all[j];
                all[j] = all[below], all[below++] = found;
            }
    }
    free(all);
    return below ? ticks : -1;
}
