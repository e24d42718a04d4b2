// A broker of franz-go's package kfake, for tools/conformance.py. It prints its address and runs until standard
// input ends.
package main

import (
	"fmt"
	"io"
	"os"

	"github.com/twmb/franz-go/pkg/kfake"
)

func main() {
	cluster := kfake.MustCluster(kfake.NumBrokers(1))
	defer cluster.Close()
	fmt.Println(cluster.ListenAddrs()[0])
	io.Copy(io.Discard, os.Stdin)
}
