// A broker of franz-go's package kfake, for `oncelog_devtools.kfake`. It prints its address and runs until standard
// input ends.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/twmb/franz-go/pkg/kfake"
)

func main() {
	port := flag.Int("port", 0, "the port to listen on; 0 means a free port")
	topic := flag.String("topic", "", "a topic with one partition that exists from the start")
	flag.Parse()
	options := []kfake.Opt{kfake.NumBrokers(1), kfake.Ports(*port)}
	if *topic != "" {
		options = append(options, kfake.SeedTopics(1, *topic))
	}
	cluster := kfake.MustCluster(options...)
	defer cluster.Close()
	fmt.Println(cluster.ListenAddrs()[0])
	io.Copy(io.Discard, os.Stdin)
}
