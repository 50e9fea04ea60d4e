"""Memory that processes of one machine share. These modules make shared memory and limit its size; they need no MPI."""
